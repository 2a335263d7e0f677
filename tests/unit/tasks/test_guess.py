from __future__ import annotations

import pytest

from ratchet.errors import TaskError
from ratchet.tasks.base import Conversation, MultiTurnTask
from ratchet.tasks.guess import GuessTask, build_guess
from ratchet.types import Prompt

PROMPT = Prompt("x", "12-57?", reference="40")


def task(**args: int) -> GuessTask:
    return build_guess({"num_prompts": 20, "holdout": 5} | args, seed=0)


def test_bounds_are_distinct_and_hold_the_number() -> None:
    made = build_guess({"highest": 9, "holdout": 5}, seed=1)
    prompts = [*made.prompts("train"), *made.prompts("eval")]
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 45  # all there are
    for prompt in prompts:
        low, high = map(int, prompt.text.removesuffix("?").split("-"))
        assert 0 <= low <= int(prompt.reference or "") <= high <= 9
    assert {p.reference == p.text.split("-")[0] for p in prompts} == {True, False}


@pytest.mark.parametrize(
    ("guess", "reply"),
    [
        ("39", ">"),
        ("12", ">"),
        ("41", "<"),
        ("57", "<"),
        ("11", "?"),
        ("58", "?"),
        ("", "?"),
        ("4O", "?"),
        ("-1", "?"),
        ("²", "?"),  # a digit to `str.isdigit`, not to `int`
        ("40", None),
    ],
)
def test_it_says_which_way_to_go(guess: str, reply: str | None) -> None:
    assert task().step(PROMPT, Conversation(("1", guess), ("?",))).reply == reply


def test_the_sooner_the_better() -> None:
    made = task(turns=4)
    assert isinstance(made, MultiTurnTask)
    assert made.max_turns(PROMPT) == 4
    right_at = [("9",) * turn + ("40",) for turn in range(4)]
    rewards = [made.score_conversation(PROMPT, Conversation(turns)) for turns in right_at]
    assert rewards == [1.0, 0.75, 0.5, 0.25]
    assert made.score_conversation(PROMPT, Conversation(("40", "41"))) == 0.0


def test_more_bounds_than_there_are_is_a_mistake_with_a_way_out() -> None:
    with pytest.raises(TaskError, match=r"num_prompts = 46 .* the 45 pairs .*highest = 9"):
        task(highest=9, num_prompts=46)
