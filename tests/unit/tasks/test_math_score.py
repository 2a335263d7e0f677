from __future__ import annotations

import threading

import pytest

from ratchet.errors import RewardFailed
from ratchet.tasks.math_score import score
from ratchet.tasks.registry import load_reward
from ratchet.types import Prompt


def of(answer: str | None, completion: str) -> float:
    return score(Prompt("p", "?", answer), completion)


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("1/2", r"The answer is \boxed{\frac{2}{4}}."),
        ("1/2", "so we get 0.5"),
        (r"\frac{1}{2}", "50%"),
        (r"$\frac12$", "1/2"),
        ("1,234", "1234"),
        ("42", "I think it is 41, no, 42."),
        ("2x+2", "$2(x+1)$"),
        (r"\{1,2\}", r"$\{2, 1\}$"),
        ("A", r"\boxed{A}"),
    ],
)
def test_what_is_equal_is_right(answer: str, completion: str) -> None:
    assert of(answer, completion) == 1.0


@pytest.mark.parametrize(
    ("answer", "completion"),
    [
        ("1/2", "0.51"),
        ("42", "42 or 43"),
        ("42", r"42, that is \boxed{41}"),
        ("42", ""),
        ("42", "no idea"),
        ("42", r"$\frac{1}{$"),
        ("A", r"\boxed{B}"),
    ],
)
def test_what_is_not_equal_or_cannot_be_read_is_wrong(answer: str, completion: str) -> None:
    assert of(answer, completion) == 0.0


def test_an_answer_that_cannot_be_compared_with_fails_instead_of_being_zero() -> None:
    with pytest.raises(RewardFailed, match="'p' has no answer"):
        of(None, "42")
    with pytest.raises(RewardFailed, match="'' of prompt 'p' is no mathematical expression"):
        of("", "42")


def test_it_scores_in_any_thread() -> None:
    """The library's own time limit raises there."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(of("1/2", "0.5")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_any_task_may_have_it_as_its_reward() -> None:
    assert load_reward("ratchet.tasks.math_score:score") is score
