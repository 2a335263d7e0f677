from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet.config import TaskConfig
from ratchet.errors import TaskError
from ratchet.tasks.base import Task
from ratchet.tasks.registry import build_task, load_reward
from ratchet.types import Prompt

OWN = """
from ratchet.types import Prompt

class Echo:
    def __init__(self, word: str, times: int = 1, seed: int = -1):
        if times < 0:
            raise ValueError("times must not be negative")
        self.word, self.times, self.seed = word, times, seed

    def prompts(self, split):
        ids = range(self.times) if split == "train" else ()
        return [Prompt(prompt_id=str(i), text=self.word) for i in ids]

    def score(self, prompt, completion):
        return float(completion == prompt.text)

def make(word: str):
    return Echo(word)

ready = Echo("ready")
number = 3

def no_task():
    return "nothing"

def length(prompt, completion):
    return len(completion) / 10

def broken(prompt, completion):
    raise RuntimeError("no reward today")

def one_argument(completion):
    return 0.0
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own_tasks.py"
    path.write_text(OWN, encoding="utf-8")
    return str(path)


def build(name: str, args: dict[str, Any] | None = None, reward: str | None = None) -> Task:
    return build_task(TaskConfig(name=name, args=args or {}, reward=reward), seed=5)


def test_built_in_tasks_are_known_by_name() -> None:
    assert build("copy", {"digits": 2, "holdout": 1}).prompts("eval")


def test_a_task_of_ones_own_is_a_class_a_function_or_an_object(own: str) -> None:
    from_class: Any = build(f"{own}:Echo", {"word": "hi", "times": 2})
    assert [prompt.text for prompt in from_class.prompts("train")] == ["hi", "hi"]
    assert from_class.seed == 5
    given_seed: Any = build(f"{own}:Echo", {"word": "hi", "seed": 9})
    assert given_seed.seed == 9
    from_function: Any = build(f"{own}:make", {"word": "hi"})
    assert (from_function.word, from_function.seed) == ("hi", -1)
    assert build(f"{own}:ready").prompts("train")[0].text == "ready"


def test_a_reward_of_ones_own_replaces_the_score(own: str) -> None:
    task = build("copy", {"digits": 2, "holdout": 1}, reward=f"{own}:length")
    prompt = task.prompts("train")[0]
    assert task.score(prompt, "abc") == 0.3
    assert prompt in build("copy", {"digits": 2, "holdout": 1}).prompts("train")


def test_a_reward_that_fails_raises_and_is_no_zero(own: str) -> None:
    task = build("copy", {"digits": 2, "holdout": 1}, reward=f"{own}:broken")
    with pytest.raises(RuntimeError, match="no reward today"):
        task.score(task.prompts("train")[0], "abc")


def test_answers_are_not_needed_where_a_reward_scores(tmp_path: Path, own: str) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt": "Write."}\n', encoding="utf-8")
    task = build("jsonl", {"path": str(path)}, reward=f"{own}:length")
    assert task.score(task.prompts("train")[0], "ab") == 0.2
    with pytest.raises(TaskError, match='"answer" is missing'):
        build("jsonl", {"path": str(path)}).prompts("train")


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("copi", {}, "task.name = 'copi' is not a built-in task; did you mean 'copy'"),
        (
            "zzz",
            {},
            "known here: copy, dataset, guess, jsonl, reasoning-gym, verifiers .*module:object",
        ),
        ("no_such_module_x:thing", {}, "task.name: .*no_such_module_x"),
        ("{own}:Echoes", {}, "task.name: .*has no 'Echoes'"),
        ("{own}:number", {}, "is 3: neither a task nor"),
        ("{own}:no_task", {}, "made 'nothing', which is not a task"),
        ("{own}:ready", {"word": "a"}, "task.args = .*is a task already and takes no arguments"),
        ("{own}:Echo", {}, r"task.args = \{\}: .*takes \(word: .*missing a required argument: 'w"),
        ("{own}:Echo", {"wrod": "a"}, "task.args = .*takes .*'word'|'wrod'"),
        ("{own}:Echo", {"word": "a", "times": -1}, "failed to build: ValueError: times must not"),
    ],
)
def test_wrong_tasks_name_field_value_and_way_out(
    own: str, name: str, args: dict[str, Any], words: str
) -> None:
    with pytest.raises(TaskError, match=words):
        build(name.replace("{own}", own), args)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("{own}:lenght", "task.reward: .*has no 'lenght'"),
        ("length", "task.reward: 'length' is not of the form"),
        ("{own}:number", "is 3, not a function"),
        ("{own}:one_argument", r"takes \(completion\): .*called with two arguments"),
    ],
)
def test_wrong_rewards_name_field_value_and_way_out(own: str, reference: str, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        load_reward(reference.replace("{own}", own))


def test_a_reward_of_completions_does_not_score_conversations() -> None:
    words = "task.reward = 'm:f' scores a completion, and 'guess' is a task of several turns"
    with pytest.raises(TaskError, match=words):
        build("guess", {"holdout": 1}, reward="m:f")


def test_the_registry_loads_no_task_that_nobody_asked_for() -> None:
    import subprocess

    code = (
        "import sys, ratchet.tasks.registry;"
        "heavy = ('torch', 'transformers', 'reasoning_gym', 'pyarrow', 'math_verify');"
        "tasks = ('copy', 'dataset', 'guess', 'jsonl', 'mixture');"
        "print([m for m in sys.modules if m in heavy"
        " or m.startswith('ratchet.tasks.') and m.split('.')[2] in tasks])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"


def test_a_prompt_reaches_the_reward_whole(own: str) -> None:
    seen: list[Prompt] = []

    def reward(prompt: Prompt, completion: str) -> float:
        seen.append(prompt)
        return 1.0

    module = sys.modules.setdefault("ratchet_test_rewards", type(sys)("ratchet_test_rewards"))
    module.reward = reward  # type: ignore[attr-defined]
    task = build("copy", {"digits": 2, "holdout": 1}, reward="ratchet_test_rewards:reward")
    prompt = task.prompts("train")[0]
    task.score(prompt, "x")
    assert seen == [prompt]
