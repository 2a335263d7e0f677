from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.helpers.training import make_groups

from ratchet.config import BufferConfig
from ratchet.errors import ConfigError, RunFailed
from ratchet.runtime.batch_filter import check_marks, load_batch_filter, open_batch_filter
from ratchet.types import RolloutGroup

FRESH, HALF = make_groups(1, 2)[0], make_groups(1, 3)[0]
HERE = __name__
threads: list[str] = []


def mark_first(groups: Sequence[RolloutGroup]) -> list[list[bool]]:
    threads.append(threading.current_thread().name)
    return [[index == 0 for index in range(len(group.rollouts))] for group in groups]


def fails(groups: Sequence[RolloutGroup]) -> list[list[bool]]:
    raise KeyError("no such reward")


def marks_groups(groups: Sequence[RolloutGroup]) -> list[bool]:
    return [True] * len(groups)


def takes_nothing() -> None:
    pass


def marks(name: str) -> tuple[tuple[bool, ...], ...]:
    batch_filter = open_batch_filter(BufferConfig(batch_groups=1, batch_filter=f"{HERE}:{name}"))
    assert batch_filter is not None
    try:
        return asyncio.run(batch_filter.marks((FRESH, HALF)))
    finally:
        batch_filter.close()


def test_the_function_marks_samples_on_a_thread_of_its_own() -> None:
    assert marks("mark_first") == ((True, False), (True, False, False))
    assert threads[-1].startswith("batch-filter")


def test_a_failure_names_the_function() -> None:
    with pytest.raises(RunFailed, match=rf"^buffer\.batch_filter: '{HERE}:fails' raised KeyError"):
        marks("fails")


def test_a_wrong_answer_names_the_function() -> None:
    with pytest.raises(RunFailed, match=rf"^buffer\.batch_filter = '{HERE}:marks_groups' returned"):
        marks("marks_groups")


@pytest.mark.parametrize("reference", ["no_such:f", f"{HERE}:no_such", f"{HERE}:takes_nothing"])
def test_what_cannot_be_called_is_refused_before_the_run(reference: str) -> None:
    with pytest.raises(ConfigError, match=r"buffer\.batch_filter"):
        load_batch_filter(BufferConfig(batch_groups=1, batch_filter=reference))


def test_without_one_there_is_none() -> None:
    assert open_batch_filter(BufferConfig(batch_groups=1)) is None


@pytest.mark.parametrize(
    "answer",
    [
        [[True, False], [False] * 3],
        ((True, False), (False, False, False)),
        [np.array([True, False]), np.zeros(3, dtype=bool)],
    ],
)
def test_marks_may_be_any_sequences_of_bools(answer: Any) -> None:
    assert check_marks("m:f", [FRESH, HALF], answer) == ((True, False), (False, False, False))


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (None, "NoneType None"),
        (True, "bool True"),
        ([True, False], "list [True, False]"),
        ([[True, 0], [False] * 3], "list [[True, 0], [False, False, False]]"),
        ([[True, False]], "marks for [2] samples"),
        ([[True, False], [False] * 2], "marks for [2, 2] samples"),
        ([], "marks for [] samples"),
    ],
)
def test_an_answer_that_is_not_one_mark_per_sample_is_an_error(answer: Any, found: str) -> None:
    with pytest.raises(RunFailed) as error:
        check_marks("my.code:f", [FRESH, HALF], answer)
    assert str(error.value).startswith(f"buffer.batch_filter = 'my.code:f' returned {found}; ")
    assert "one per rollout (here [2, 3])" in str(error.value)
