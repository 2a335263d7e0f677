"""The plan of a transfer: layout, ties, and what an engine must find in it."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratchet.errors import WeightsMismatch
from ratchet.transport.weights.base import TensorSpec
from ratchet.transport.weights.plan import (
    ALIGNMENT,
    ITEM_BYTES,
    check_specs,
    make_manifest,
    slots_by_bucket,
    tensor_bytes,
)
from ratchet.types import WeightManifest

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A loaded machine is no fault of the code."""


def plan(specs: list[TensorSpec], bucket_bytes: int = 1024) -> WeightManifest:
    return make_manifest(specs, bucket_bytes, term=3, version=7, step=5)


def f32(name: str, *shape: int, alias_of: str | None = None) -> TensorSpec:
    return TensorSpec(name, "float32", shape, alias_of)


@pytest.mark.parametrize(
    ("specs", "expected", "sizes"),
    [
        pytest.param([f32("a", 16)], [("a", 0, 0, 64)], (64,), id="one"),
        pytest.param(
            [f32("a", 3), f32("b", 3)], [("a", 0, 0, 12), ("b", 0, 64, 12)], (128,), id="aligned"
        ),
        pytest.param(
            [TensorSpec("a", "bfloat16", (33,)), f32("b"), TensorSpec("c", "bool", (1,))],
            [("a", 0, 0, 66), ("b", 0, 128, 4), ("c", 0, 192, 1)],
            (256,),
            id="mixed dtypes and a scalar",
        ),
        pytest.param(
            [f32("a", 128), f32("b", 128), f32("c", 1)],
            [("a", 0, 0, 512), ("b", 0, 512, 512), ("c", 1, 0, 4)],
            (1024, 64),
            id="a full bucket",
        ),
        pytest.param(
            [f32("a", 8), f32("b", 1000), f32("c", 8)],
            [("a", 0, 0, 32), ("b", 1, 0, 4000), ("c", 2, 0, 32)],
            (64, 4032, 64),
            id="larger than a bucket",
        ),
        pytest.param(
            [f32("a", 0), f32("b", 5, 0, 2)],
            [("a", 0, 0, 0), ("b", 0, 0, 0)],
            (64,),
            id="nothing but empty tensors",
        ),
        pytest.param(
            [f32("tied", 4, alias_of="a"), f32("a", 4)],
            [("a", 0, 0, 16)],
            (64,),
            id="tied ones travel once",
        ),
    ],
)
def test_layout(
    specs: list[TensorSpec], expected: list[tuple[str, int, int, int]], sizes: tuple[int, ...]
) -> None:
    manifest = plan(specs)
    assert [(s.name, s.bucket, s.offset, s.num_bytes) for s in manifest.slots] == expected
    assert manifest.bucket_bytes == sizes


def test_a_manifest_says_what_it_is_for() -> None:
    manifest = plan([f32("a", 4), f32("b", 4, alias_of="a")])
    assert (manifest.term, manifest.version, manifest.step) == (3, 7, 5)
    assert manifest.aliases == {"b": "a"}


specs_strategy = st.lists(
    st.tuples(
        st.sampled_from(sorted(ITEM_BYTES)),
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
        st.booleans(),
    ),
    min_size=1,
    max_size=30,
)


@unhurried
@given(specs_strategy, st.sampled_from([1, 64, 100, 1024, 2**26]))
def test_slots_are_aligned_disjoint_and_complete(
    drawn: list[tuple[str, tuple[int, ...], bool]], bucket_bytes: int
) -> None:
    specs: list[TensorSpec] = []
    for n, (dtype, shape, tied) in enumerate(drawn):
        previous = specs[-1] if specs else None
        if tied and previous is not None and previous.alias_of is None:
            specs.append(previous._replace(name=f"p{n}", alias_of=previous.name))
        else:
            specs.append(TensorSpec(f"p{n}", dtype, shape))
    manifest = plan(specs, bucket_bytes)
    own = [spec for spec in specs if spec.alias_of is None]
    assert [(s.name, s.dtype, s.shape) for s in manifest.slots] == [spec[:3] for spec in own]
    assert set(manifest.aliases) == {spec.name for spec in specs} - {spec.name for spec in own}
    for slots, size in zip(slots_by_bucket(manifest), manifest.bucket_bytes, strict=True):
        assert size % ALIGNMENT == 0
        end = 0
        for slot in slots:
            assert slot.offset % ALIGNMENT == 0
            assert slot.offset % ITEM_BYTES[slot.dtype] == 0
            assert slot.offset >= end
            assert slot.num_bytes == math.prod(slot.shape) * ITEM_BYTES[slot.dtype]
            end = slot.offset + slot.num_bytes
        assert end <= size
        # a bucket is filled up, and only a single tensor may be larger
        assert size <= max(bucket_bytes, ALIGNMENT) + ALIGNMENT or (
            sum(slot.num_bytes > 0 for slot in slots) == 1
        )
    # both ends agree: what was planned is accepted as it is
    owners = check_specs(manifest, specs)
    assert owners == {spec.name: (spec.name,) for spec in own}
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=WeightManifest)
    assert decoded == manifest


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "nothing to send"),
        ([f32("a", 4), f32("a", 4)], "described twice .1.: a"),
        ([TensorSpec("a", "int4", (4,))], "a has dtype 'int4'; known: bool"),
        ([f32("b", 4, alias_of="a")], "b is tied to a, which is not a parameter that travels"),
        (
            [f32("a", 4), f32("b", 4, alias_of="a"), f32("c", 4, alias_of="b")],
            "c is tied to b, which is not",
        ),
        ([f32("a", 4), f32("b", 5, alias_of="a")], "b is tied to a, and has another shape"),
    ],
)
def test_a_trainer_that_describes_nonsense_is_refused(
    specs: list[TensorSpec], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        plan(specs)


TRAINER = [f32("embed", 8, 4), f32("norm", 4), f32("head", 8, 4, alias_of="embed")]


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            [*TRAINER, f32("bias", 4)],
            r"^missing from the transfer \(1\): bias$",
        ),
        (TRAINER[:1], r"^unknown to the engine \(2\): norm, head$"),
        (
            [TRAINER[0], f32("norm", 5), TRAINER[2]],
            r"^different \(1\): norm is float32\[4\] at the trainer, float32\[5\] at the engine$",
        ),
        (
            [TRAINER[0], TensorSpec("norm", "bfloat16", (4,)), TRAINER[2]],
            r"norm is float32\[4\] at the trainer, bfloat16\[4\] at the engine",
        ),
        (
            [TRAINER[0], f32("norm", 8, 4, alias_of="embed"), TRAINER[2]],
            r"different .*; tied at the engine, separate at the trainer \(1\): norm and embed",
        ),
        (
            [*TRAINER, *(f32(f"bias{n}", 4) for n in range(7))],
            r"\(7\): bias0, bias1, bias2, bias3, bias4, \.\.\.$",
        ),
        (
            [f32("norm", 4), f32("odd", 1)],
            r"^missing from the transfer \(1\): odd; unknown to the engine \(2\): embed, head$",
        ),
    ],
)
def test_an_engine_that_does_not_fit_is_told_why(engine: list[TensorSpec], message: str) -> None:
    with pytest.raises(WeightsMismatch, match=message):
        check_specs(plan(TRAINER), engine)


@pytest.mark.parametrize(
    ("engine", "owners"),
    [
        (TRAINER, {"embed": ("embed",), "norm": ("norm",)}),
        (
            [f32("head", 8, 4), f32("norm", 4), f32("embed", 8, 4)],
            {"embed": ("head", "embed"), "norm": ("norm",)},
        ),
        (
            [f32("head", 8, 4), f32("norm", 4), f32("embed", 8, 4, alias_of="head")],
            {"embed": ("head",), "norm": ("norm",)},
        ),
    ],
    ids=["same ties", "no ties at the engine", "tied the other way round"],
)
def test_an_engine_may_tie_otherwise(
    engine: list[TensorSpec], owners: dict[str, tuple[str, ...]]
) -> None:
    assert check_specs(plan(TRAINER), engine) == owners


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 32},
        {"offset": 256},
        {"offset": -64},
        {"num_bytes": 12},
        {"dtype": "float16"},
        {"dtype": "object"},
        {"shape": (-4,)},
        {"shape": (-2, -2)},
        {"bucket": 1},
        {"bucket": -1},
        {"name": "b"},
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    manifest = plan([f32("a", 4), f32("b", 4), f32("c", 4)])
    first = msgspec.structs.replace(manifest.slots[0], **change)
    broken = msgspec.structs.replace(manifest, slots=(first, *manifest.slots[1:]))
    with pytest.raises(WeightsMismatch, match="manifest"):
        check_specs(broken, [f32("a", 4), f32("b", 4), f32("c", 4)])


def test_slots_that_overlap_are_refused() -> None:
    manifest = plan([f32("a", 32), f32("b", 4)])
    moved = msgspec.structs.replace(manifest.slots[1], offset=64)
    broken = msgspec.structs.replace(manifest, slots=(manifest.slots[0], moved))
    with pytest.raises(WeightsMismatch, match="slot of b does not fit"):
        check_specs(broken, [f32("a", 32), f32("b", 4)])


def test_an_alias_of_nothing_is_refused() -> None:
    manifest = msgspec.structs.replace(plan([f32("a", 4)]), aliases={"b": "c"})
    with pytest.raises(WeightsMismatch, match="does not travel"):
        check_specs(manifest, [f32("a", 4)])


def test_every_known_dtype_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    for name, size in ITEM_BYTES.items():
        assert getattr(torch, name).itemsize == size
        assert tensor_bytes(TensorSpec("a", name, (3, 2))) == 6 * size
