from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from ratchet.errors import TaskError
from ratchet.tasks import reasoning_gym as module
from ratchet.tasks.reasoning_gym import ReasoningGymTask, build_reasoning_gym
from ratchet.types import Prompt

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def build(dataset: str = "chain_sum", seed: int = 0, **args: Any) -> ReasoningGymTask:
    if dataset == "chain_sum":
        args.setdefault("config", SUMS)
    return build_reasoning_gym({"dataset": dataset, "size": 400, **args}, seed)


def test_problems_are_distinct_and_held_out_ones_are_never_trained_on() -> None:
    task = build(size=1000, prompt="expression", holdout=40)
    train, held_out = ({p.text for p in task.prompts(split)} for split in ("train", "eval"))
    assert len(held_out) == 40
    assert train.isdisjoint(held_out)
    assert len(task.prompts("train")) == len(train)
    assert 190 <= len(train) + 40 <= 200  # the library has 10 x 2 x 10 of them


def test_an_expression_is_the_short_form_of_the_question() -> None:
    prompt = build(prompt="expression").prompts("train")[0]
    left, operator, right, equals = prompt.text
    value = int(left) + int(right) if operator == "+" else int(left) - int(right)
    assert equals == "="
    assert prompt.reference == str(value)


def test_the_template_wraps_the_prompt() -> None:
    plain, wrapped = build(), build(template="<q>{prompt}</q> {x}")
    texts = {f"<q>{prompt.text}</q> {{x}}" for prompt in plain.prompts("train")}
    wrapped_texts = {
        prompt.text for split in ("train", "eval") for prompt in wrapped.prompts(split)
    }
    assert texts <= wrapped_texts


def test_binary_scores_close_the_trap_of_partial_ones() -> None:
    partial, binary = (build("spell_backward", binary=value) for value in (False, True))
    prompt = partial.prompts("train")[0]
    assert prompt.reference is not None
    nearly = prompt.reference + "zz"
    assert partial.score(prompt, nearly) >= 0.8
    assert binary.score(prompt, nearly) == 0.0
    assert binary.score(prompt, f" {prompt.reference}\n") == 1.0


def test_a_scorer_that_never_built_the_prompts_gives_the_same_score() -> None:
    prompt = build().prompts("train")[3]
    assert prompt.reference is not None
    fresh = build()
    assert fresh.score(prompt, prompt.reference) == 1.0
    assert fresh.score(prompt, prompt.reference + "1") == 0.0


def test_a_problem_that_comes_out_differently_is_a_failure_and_not_a_zero() -> None:
    task = build()
    prompt = task.prompts("train")[0]
    other = Prompt(prompt_id="x", text="another", reference="1", metadata=prompt.metadata)
    with pytest.raises(TaskError, match="another problem from the same index"):
        task.score(other, "1")


def test_the_seed_is_the_runs_unless_it_is_given() -> None:
    assert build(seed=1).prompts("train") != build(seed=2).prompts("train")
    assert build(seed=1, **{"config": SUMS}).prompts("train") == build(seed=1).prompts("train")
    given = [
        build_reasoning_gym({"dataset": "chain_sum", "size": 50, "seed": 7}, seed).prompts("train")
        for seed in (1, 2)
    ]
    assert given[0] == given[1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, r"task\.args\.dataset is missing"),
        ({"dataset": "chain_sums"}, "'chain_sums' is not one of .*did you mean 'chain_sum'"),
        ({"dataset": "../x"}, r"'\.\./x' is not one of the library's"),
        (
            {"dataset": "chain_sum", "config": {"max_term": 2}},
            r"unknown key task\.args\.config\.max_term; did you mean 'max_terms'",
        ),
        (
            {"dataset": "chain_sum", "config": {"size": 2}},
            r"task\.args\.config\.size: give it as task\.args\.size",
        ),
        (
            {"dataset": "chain_sum", "config": {"min_terms": 0}},
            r"task\.args\.config = \{'min_terms': 0\}: min_terms must be positive",
        ),
        ({"dataset": "chain_sum", "prompt": "short"}, r"task\.args\.prompt = 'short'"),
        ({"dataset": "spell_backward", "prompt": "expression"}, "has no expressions"),
        ({"dataset": "chain_sum", "template": "hello"}, r"must hold the place \"\{prompt\}\""),
        ({"dataset": "chain_sum", "terms": 2}, r"unknown key task\.args\.terms"),
    ],
)
def test_wrong_arguments_name_field_value_and_way_out(args: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        build_reasoning_gym(args, 0)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        module, "find_spec", lambda name: None if name == "reasoning_gym" else find_spec(name)
    )
    with pytest.raises(TaskError, match=r"pip install 'ratchet-rl\[reasoning-gym\]'"):
        build()


ALONE_AND_WHOLE = """
import json, sys
from ratchet.tasks.reasoning_gym import build_reasoning_gym
args = {"dataset": "chain_sum", "size": 100}
alone = build_reasoning_gym(args, 3).prompts("train")
clean = not any(name.partition(".")[0] in ("reasoning_gym", "sympy") for name in sys.modules)
import reasoning_gym
whole = build_reasoning_gym(args, 3).prompts("train")
same = reasoning_gym.create_dataset("chain_sum", size=100, seed=3)[5]["question"]
print(json.dumps([clean, alone == whole, same in {p.text for p in whole}, "sympy" in sys.modules]))
"""


def test_one_dataset_alone_is_the_same_and_leaves_the_library_importable() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE_AND_WHOLE], capture_output=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == [True, True, True, True]
