from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from ratchet.actors.prompt_source import PromptSource
from ratchet.errors import TaskError
from ratchet.types import Prompt

WEIGHTS = {"big": 1.0, "small": 3.0, "tiny": 0.5}
SIZES = {"big": 11, "small": 4, "tiny": 1}


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), f"text {i}") for i in range(count)]


def mixed() -> list[Prompt]:
    return [Prompt(f"{label}/{i}", "") for label, size in SIZES.items() for i in range(size)]


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


def test_each_task_of_a_mixture_has_epochs_of_its_own() -> None:
    source = PromptSource(mixed(), 3, WEIGHTS)
    taken = [(prompt.prompt_id, epoch) for epoch, prompt in (source.next() for _ in range(900))]
    assert len(set(taken)) == len(taken)  # what the ledger relies on
    shares = Counter(prompt_id.split("/")[0] for prompt_id, _ in taken)
    assert shares == {"big": 200, "small": 600, "tiny": 100}
    for label, size in SIZES.items():
        of_task = [(i, epoch) for i, epoch in taken if i.startswith(label)]
        for start in range(0, len(of_task) - size, size):  # one pass after the other, each whole
            one_pass = of_task[start : start + size]
            assert {epoch for _, epoch in one_pass} == {start // size}
            assert {i for i, _ in one_pass} == {f"{label}/{i}" for i in range(size)}


def test_another_task_beside_it_does_not_change_the_order_of_a_task() -> None:
    both, one = PromptSource(mixed(), 3, WEIGHTS), PromptSource(mixed()[:11], 3, {"big": 7.0})
    in_both = [
        prompt for _, prompt in (both.next() for _ in range(100)) if "big" in prompt.prompt_id
    ]
    assert in_both == [one.next()[1] for _ in in_both]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_the_cursor_finds_the_rest_of_the_order(weights: dict[str, float] | None) -> None:
    source = PromptSource(mixed(), 3, weights)
    for _ in range(50):
        cursor = source.epoch, source.position
        found = PromptSource(mixed(), 3, weights)
        found.seek(*cursor)
        assert (found.epoch, found.position) == cursor
        ahead = PromptSource(mixed(), 3, weights)
        ahead.seek(*cursor)
        following = [ahead.next() for _ in range(20)]
        assert [found.next() for _ in range(20)] == following
        assert source.next() == following[0]


def test_the_cursor_of_one_task_is_its_epoch_and_position() -> None:
    source = PromptSource(prompts(3), seed=0)
    cursors = []
    for _ in range(7):
        source.next()
        cursors.append((source.epoch, source.position))
    assert cursors == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3), (2, 1)]


def test_no_prompts_is_a_mistake_of_the_task() -> None:
    with pytest.raises(TaskError, match="no training prompts"):
        PromptSource([], seed=0)
    with pytest.raises(TaskError, match="no training prompts"):
        PromptSource(prompts(0), 0, {"big": 1.0})


def test_to_find_some_looks_through_all_once_only() -> None:
    class Counted(list[Prompt]):
        looked = 0

        def __iter__(self) -> Iterator[Prompt]:
            Counted.looked += 1
            return super().__iter__()

    source = PromptSource(Counted(prompts(20)), seed=3)
    for step in range(5):  # each step that a trainer has lost
        assert set(source.find([str(step)])) == {str(step)}
    assert Counted.looked == 1
