"""An engine that cannot be read back proves by a probe what it holds."""

from __future__ import annotations

import msgspec
import pytest
from tests.helpers.finalize_stage import Stage
from tests.helpers.weights import ProbedFakeSink

from ratchet.errors import WeightsMismatch
from ratchet.types import Packed, WeightProbe

PROBE = WeightProbe(3, Packed.of([1, 2, 3], "int32"), Packed.of([-1.0, -2.0], "float32"))
OTHER = WeightProbe(3, Packed.of([1, 2, 3], "int32"), Packed.of([-1.0, -2.5], "float32"))


def probed(probe: WeightProbe | None, computes: WeightProbe) -> tuple[Stage, ProbedFakeSink]:
    stage = Stage(2**26, kind=ProbedFakeSink)
    stage.manifest = msgspec.structs.replace(stage.manifest, probe=probe)
    assert isinstance(stage.sink, ProbedFakeSink)
    stage.sink.computes = computes
    return stage, stage.sink


def test_an_engine_that_cannot_be_read_back_proves_what_it_holds_in_the_stamp() -> None:
    stage, sink = probed(PROBE, PROBE)
    stage.load()
    assert stage.events == [
        *["expect", "arrive", "trailer", "pause", "write", "commit", "stamp", "resume"],
    ]
    assert sink.version == 7


def test_an_engine_that_computes_something_else_is_quarantined_and_resumed() -> None:
    stage, sink = probed(PROBE, OTHER)
    with pytest.raises(WeightsMismatch, match="something else"):
        stage.load()
    assert stage.events[-2:] == ["refused", "resume"]
    assert sink.version is None


def test_without_a_probe_an_engine_that_cannot_be_read_back_is_left_alone() -> None:
    stage, sink = probed(None, OTHER)
    with pytest.raises(WeightsMismatch, match=r"version 7 came without a probe.*weights\.verify"):
        stage.load()
    assert stage.events == []
    assert sink.version == 6


def test_without_verification_it_is_taken_on_trust() -> None:
    stage, sink = probed(PROBE, OTHER)
    stage.load(verify=False)
    assert sink.version == 7
    assert sink.expected is None
