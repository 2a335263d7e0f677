from __future__ import annotations

import pytest

from ratchet.errors import TaskError
from ratchet.tasks.arguments import Holdout, TaskArgs, parse_args, suggest


class Args(TaskArgs):
    size: int
    holdout: Holdout = 0


@pytest.mark.parametrize("value", [0, 1, 256, 256.0, 0.5])
def test_a_holdout_is_a_count_or_a_share(value: float) -> None:
    assert parse_args(Args, {"size": 1, "holdout": value}).holdout == value


@pytest.mark.parametrize("value", [-1, -0.5, 1.5, "0.5", True, float("nan"), float("inf")])
def test_anything_else_is_no_holdout(value: object) -> None:
    with pytest.raises(TaskError, match=r"task\.args\.holdout = "):
        parse_args(Args, {"size": 1, "holdout": value})


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(TaskError) as caught:
        parse_args(Args, {"holdout": "x", "sizes": 3})
    first, *others = str(caught.value).splitlines()
    assert first == "task.args:"
    assert [line.strip() for line in others] == [
        "task.args.size is missing",
        "task.args.holdout = 'x': Input should be a valid number",
        "unknown key task.args.sizes; did you mean 'size'?",
    ]


def test_a_name_that_is_close_to_nothing_gets_the_whole_list() -> None:
    assert suggest("zzz", ["size", "holdout"]) == "known here: holdout, size"
