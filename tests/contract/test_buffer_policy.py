"""One suite for every policy of the buffer, ours and a user's; and what breaks it is named."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ratchet.actors.buffer_policy import BufferPolicy, Fifo
from ratchet.errors import RunFailed
from ratchet.testing import check_buffer_policy, random_group
from ratchet.types import RolloutGroup

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_buffer.py"


def example_policy() -> BufferPolicy:
    spec = importlib.util.spec_from_file_location("own_buffer", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    policy: BufferPolicy = module.WidestFirst()
    return policy


@pytest.mark.parametrize("make", [Fifo, example_policy])
def test_a_policy_keeps_the_contract(make: Callable[[], BufferPolicy]) -> None:
    check_buffer_policy(make)


class Twice(Fifo):
    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        return [next(iter(finished))] * num_groups


class Invents(Fifo):
    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        return range(10**6, 10**6 + num_groups)


class TooFew(Fifo):
    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        return list(super().get(max(1, num_groups - 1), finished))


class Groups(Fifo):
    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        found: Any = list(finished.values())[:num_groups]
        return found  # type: ignore[no-any-return]


class NothingAtAll(Fifo):
    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        found: Any = None
        return found  # type: ignore[no-any-return]


class Waits(Fifo):
    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        return ()


class Takes(Fifo):
    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        taken: Any = finished
        return [taken.popitem()[0] for _ in range(num_groups)]


class RemembersTheGone(Fifo):
    """What has left as stale is still chosen."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, group: RolloutGroup) -> None:
        self.ids.append(group.group_id)

    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        chosen, self.ids = self.ids[:num_groups], self.ids[num_groups:]
        return chosen


class Shares(Fifo):
    """One list for all objects of the class."""

    ids: list[int] = []

    def put(self, group: RolloutGroup) -> None:
        self.ids.append(group.group_id + 1000 * id(self))

    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        own = [each - 1000 * id(self) for each in self.ids[-num_groups:]]
        return own if len(set(own)) == num_groups else tuple(finished)[:num_groups]


class NoNumber(Fifo):
    def metrics(self) -> Mapping[str, float]:
        return {"share": float("nan")}


class Raises(Fifo):
    def put(self, group: RolloutGroup) -> None:
        raise LookupError(group.prompt_id)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Twice, r"Twice.*get\(\).*names a group twice"),
        (Invents, r"Invents.*1000000.*not among the finished"),
        (TooFew, r"TooFew.*has 2 groups; a batch has 3"),
        (Groups, r"Groups.*is not a sequence of group ids"),
        (NothingAtAll, r"NothingAtAll.*None for 1 groups is not a sequence"),
        (Waits, r"Waits.*waits for more.*none will come"),
        (Takes, r"Takes.*raised AttributeError.*popitem"),
        (RemembersTheGone, r"RemembersTheGone.*not among the finished"),
        (Shares, r"Shares.*not among the finished"),
        (NoNumber, r"NoNumber.*metrics\(\) gave 'share' = nan"),
        (Raises, r"Raises.*put\(\) raised LookupError"),
    ],
)
def test_a_policy_that_breaks_it_is_named(make: Callable[[], BufferPolicy], text: str) -> None:
    with pytest.raises(RunFailed, match=text):
        check_buffer_policy(make)


def test_the_name_in_errors_may_be_given() -> None:
    with pytest.raises(RunFailed, match="mine:Policy"):
        check_buffer_policy(Waits, name="mine:Policy")


def test_the_same_seed_gives_the_same_calls() -> None:
    assert random_group(random.Random(3), 1) == random_group(random.Random(3), 1)

    calls: list[list[Any]] = []

    class Records(Fifo):
        def put(self, group: RolloutGroup) -> None:
            calls[-1].append(group)

    for _ in range(2):
        calls.append([])
        check_buffer_policy(Records, seed=7, batches=3)
    assert calls[0] == calls[1] != []
