from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.errors import TaskError
from ratchet.tasks.copy import build_copy, share_of_right_positions
from ratchet.types import Prompt

digits = st.text("01", max_size=5)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("4071", 1.0),
        ("", 0.0),
        ("407", 0.6),  # the end comes too early: one digit and the end are wrong
        ("4072", 0.8),
        ("40711", 0.8),  # right digits, no end
        ("4017", 0.6),
        ("9999", 0.2),  # only the end
    ],
)
def test_the_end_is_a_position_like_any_other(completion: str, reward: float) -> None:
    task = build_copy({}, seed=0)
    prompt = Prompt(prompt_id="x", text="4071>", reference="4071")
    assert task.score(prompt, completion) == pytest.approx(reward)


@settings(max_examples=60)
@given(digits, digits)
def test_only_an_exact_copy_earns_everything(target: str, completion: str) -> None:
    reward = share_of_right_positions(target, completion)
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == (target == completion)


def test_all_strings_are_distinct_and_another_seed_gives_others() -> None:
    task = build_copy({"digits": 6, "num_prompts": 500, "holdout": 50}, seed=1)
    strings = [p.text for split in ("train", "eval") for p in task.prompts(split)]
    assert len(set(strings)) == 500
    assert all(len(text) == 7 and text[:6].isdigit() and text[6] == ">" for text in strings)
    other = build_copy({"digits": 6, "num_prompts": 500, "holdout": 50}, seed=2)
    assert other.prompts("train") != task.prompts("train")


def test_by_default_short_strings_are_all_there_are() -> None:
    task = build_copy({"digits": 2, "holdout": 10}, seed=0)
    assert len(task.prompts("train")) == 90
    assert len(task.prompts("eval")) == 10


def test_what_one_seed_holds_out_no_other_seed_trains_on() -> None:
    one, two = (build_copy({"digits": 3, "holdout": 0.2}, seed=seed) for seed in (1, 2))
    trained = {prompt.text for prompt in one.prompts("train")}
    assert trained.isdisjoint(prompt.text for prompt in two.prompts("eval"))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"digit": 4}, "unknown key task.args.digit; did you mean 'digits'"),
        ({"digits": 0}, "task.args.digits = 0"),
        ({"digits": "4"}, "task.args.digits = '4'"),
        ({"digits": 2, "num_prompts": 101}, "num_prompts = 101 is more than the 100 strings"),
        ({"digits": 1, "holdout": 10}, "holdout = 10 leaves nothing to train on"),
        ({"holdout": -1}, "task.args.holdout = -1: give a number of problems"),
        ({"holdout": 1.5}, "task.args.holdout = 1.5: give a number of problems"),
        ({"digits": 0, "size": 3}, r"task.args:\n.*task.args.digits = 0.*\n.*task.args.size"),
    ],
)
def test_wrong_arguments_name_field_value_and_way_out(args: dict[str, object], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        build_copy(args, seed=0)
