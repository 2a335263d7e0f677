"""What the trainer's model computes against what a server says."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from tests.helpers.sglang_stub import SGLangStub

from ratchet.backends.rollout.sglang.client import CallRefused, SGLangClient
from ratchet.backends.rollout.sglang.probe import (
    Scored,
    ScoredMeta,
    check_probe,
    largest_difference,
    tolerance_of,
)
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.types import Packed, WeightProbe

IDS = [[5, 6, 7, 8], [1, 2, 3, 4]]
LOGPROBS = [[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]]
PROBE = WeightProbe(4, Packed.of(IDS, "int32"), Packed.of(LOGPROBS, "float32"))


def answers(**changed: float | None) -> list[Scored]:
    """Return a server's answer; "r1c2" is token 2 of sequence 1."""
    scored = []
    for row, (ids, values) in enumerate(zip(IDS, LOGPROBS, strict=True)):
        columns = [
            (changed.get(f"r{row}c{column}", value), token, None)
            for column, (token, value) in enumerate(zip(ids[1:], values, strict=True), 1)
        ]
        scored.append(Scored(ScoredMeta([(None, ids[0], None), *columns])))
    return scored


def test_equal_is_no_difference() -> None:
    assert largest_difference(PROBE, answers()).size == 0.0


def test_the_largest_difference_is_found_wherever_it_is() -> None:
    found = largest_difference(PROBE, answers(r0c3=-3.25, r1c2=-4.5, r1c3=-6.125))
    assert found == (0.5, 1, 2, -5.0, -4.5)


@pytest.mark.parametrize("bad", [math.nan, None, math.inf, -math.inf])
def test_what_is_not_a_number_is_the_largest_difference_there_is(bad: float | None) -> None:
    size = largest_difference(PROBE, answers(r1c1=bad, r0c1=100.0)).size
    assert not size <= 1e9


def test_a_server_that_scored_other_ids_proves_nothing() -> None:
    other = answers()
    other[1].meta_info.input_token_logprobs[2] = (-5.0, 0, None)
    with pytest.raises(WeightsMismatch, match="other ids"):
        largest_difference(PROBE, other)
    other[1].meta_info.input_token_logprobs.pop()
    with pytest.raises(WeightsMismatch, match="other ids"):
        largest_difference(PROBE, other)


def test_the_tolerance_is_that_of_the_dtype_unless_it_is_configured() -> None:
    assert tolerance_of(None, "float32") == 1e-3
    assert tolerance_of(None, "bfloat16") > tolerance_of(None, "float16") > 1e-3
    assert tolerance_of(0.01, "bfloat16") == 0.01
    assert np.isfinite(tolerance_of(None, "float64"))


def test_no_server_is_left_scoring_when_another_has_failed() -> None:
    class Server:
        url = "http://server"

        def __init__(self) -> None:
            self.may_end = asyncio.Event()

        async def generate(self, *_: object, **__: object) -> list[Scored]:
            await self.may_end.wait()
            return answers()

    class Broken(Server):
        async def generate(self, *_: object, **__: object) -> list[Scored]:
            raise CallRefused("POST /generate", 500, "out of order")

    async def main() -> None:
        slow = Server()
        servers: Any = [Broken(), slow]
        proof = asyncio.create_task(check_probe(servers, 8, PROBE, tolerance=0.1, timeout_s=5))
        for _ in range(9):
            await asyncio.sleep(0)
        assert not proof.done()
        slow.may_end.set()
        with pytest.raises(TransferFailed, match=r"version 8 could not be proved.*out of order"):
            await proof

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"error": "no such thing"}, "Expected `array`, got `object`"),
        ([{}, {}], "missing required field `meta_info`"),
        ([{"meta_info": {}}], r"missing required field `input_token_logprobs` .*\[0\]\.meta_info"),
        ([{"meta_info": {"input_token_logprobs": None}}], "Expected `array`, got `null`"),
        ([], "scored 0 of 2 sequences"),
    ],
)
def test_a_server_that_answers_something_else_proves_nothing(answer: Any, told: str) -> None:
    async def main() -> None:
        async with SGLangStub(answers={"/generate": (200, answer)}).serving() as stub:
            client = SGLangClient(stub.url)
            try:
                with pytest.raises(TransferFailed, match=told) as raised:
                    await check_probe([client], 8, PROBE, tolerance=0.1, timeout_s=5)
            finally:
                await client.close()
            where = f"version 8 could not be proved: POST {stub.url}/generate"
            assert str(raised.value).startswith(where)

    asyncio.run(main())
