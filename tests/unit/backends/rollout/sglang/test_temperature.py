"""What a server may answer when it is asked whether it honours the temperature; the check as a
whole is in test_fleet.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
import pytest

from ratchet.backends.rollout.sglang.client import SGLangClient
from ratchet.backends.rollout.sglang.temperature import next_logprobs
from ratchet.errors import EngineLost


class Says:
    """A client whose server gives one answer to everything."""

    def __init__(self, ids: Sequence[int], num_tokens: int = 1) -> None:
        scores = [[-0.5, token, None] for token in ids]
        meta = {"output_token_ids_logprobs": [scores] * num_tokens}
        self._answer = msgspec.json.encode([{"meta_info": meta}] * 2)

    async def generate(
        self, body: object, *, timeout_s: float, decode: Callable[[bytes], Any]
    ) -> Any:
        return decode(self._answer)


def ask(client: Says) -> list[Sequence[float]]:
    return asyncio.run(next_logprobs(cast("SGLangClient", client), 1.0))


def test_the_scores_of_the_ids_that_were_asked_for() -> None:
    assert ask(Says([3, 0, 2, 1])) == [[-0.5] * 4] * 2


@pytest.mark.parametrize("ids", [[0, 1, 2], [0, 1, 2, 9]])
def test_other_ids_are_an_error_that_names_them(ids: list[int]) -> None:
    with pytest.raises(EngineLost, match=r"scored \[0, 1, 2.*\] where it was asked for"):
        ask(Says(ids))


def test_another_number_of_tokens_is_no_answer() -> None:
    with pytest.raises(msgspec.ValidationError):  # of which the client makes a `CallFailed`
        ask(Says([0, 1, 2, 3], num_tokens=2))
