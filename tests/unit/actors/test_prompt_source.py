from __future__ import annotations

import pytest

from ratchet.actors.prompt_source import PromptSource
from ratchet.errors import TaskError
from ratchet.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), f"text {i}") for i in range(count)]


def test_each_prompt_once_an_epoch() -> None:
    source = PromptSource(prompts(7), seed=3)
    taken = [source.next() for _ in range(21)]
    for epoch in range(3):
        ids = [prompt.prompt_id for e, prompt in taken if e == epoch]
        assert sorted(ids) == [str(i) for i in range(7)]
    orders = [tuple(p.prompt_id for e, p in taken if e == epoch) for epoch in range(3)]
    assert len(set(orders)) > 1


def test_the_order_is_that_of_the_seed() -> None:
    def order(seed: int) -> list[str]:
        source = PromptSource(prompts(20), seed)
        return [source.next()[1].prompt_id for _ in range(40)]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_no_prompts_is_a_mistake_of_the_task() -> None:
    with pytest.raises(TaskError, match="no training prompts"):
        PromptSource([], seed=0)
