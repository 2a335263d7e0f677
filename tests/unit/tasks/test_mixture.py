from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config

from ratchet.config import Config, TaskConfig, parse_config
from ratchet.errors import ConfigError, TaskError
from ratchet.tasks.base import Conversation, MultiTurnTask, Split, Step, Task
from ratchet.tasks.mixture import MixtureTask, label_of
from ratchet.tasks.problems import check_task
from ratchet.tasks.registry import build_task
from ratchet.types import Prompt

TALK = Conversation(("hello",))


class Answers:
    """Remembers by which ids it was asked."""

    def __init__(self, word: str, num_train: int = 3) -> None:
        self.word, self.num_train = word, num_train
        self.asked: list[str] = []

    def prompts(self, split: Split) -> list[Prompt]:
        ids = range(self.num_train) if split == "train" else range(100, 102)
        return [Prompt(str(i), f"{self.word}{i}") for i in ids]

    def score(self, prompt: Prompt, completion: str) -> float:
        self.asked.append(prompt.prompt_id)
        return float(completion == self.word)


class Talks(Answers):
    def max_turns(self, prompt: Prompt) -> int:
        return 4

    def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        return Step(f"{self.word} {prompt.prompt_id}")

    def score_conversation(self, prompt: Prompt, conversation: Conversation) -> float:
        return 0.25


def mixture(**tasks: Task) -> MixtureTask:
    return MixtureTask(tasks, {label: 1.0 + 2.0 * (label == "b") for label in tasks})


def test_ids_say_the_task_and_the_first_prompts_are_a_mixture() -> None:
    task = mixture(a=Answers("x"), b=Answers("y", 9))
    ids = [prompt.prompt_id for prompt in task.prompts("train")]
    assert " ".join(ids) == "b/0 a/0 b/1 b/2 b/3 a/1 b/4 b/5 b/6 a/2 b/7 b/8"
    assert [label_of(i) for i in ids[:4]] == ["b", "a", "b", "b"]
    assert {p.prompt_id for p in task.prompts("eval")} == {"a/100", "a/101", "b/100", "b/101"}
    assert check_task(task).num_train == 12


def test_each_task_scores_its_own_prompts_by_the_ids_that_it_gave() -> None:
    a, b = Answers("x"), Answers("y")
    task = mixture(a=a, b=b)
    scores = {p.prompt_id: task.score(p, "x") for p in task.prompts("train")}
    assert scores == {f"a/{i}": 1.0 for i in range(3)} | {f"b/{i}": 0.0 for i in range(3)}
    assert (a.asked, b.asked) == (["0", "1", "2"], ["0", "1", "2"])
    with pytest.raises(TaskError, match=r"'c/0' is of none of the tasks of this run: a, b"):
        task.score(Prompt("c/0", ""), "x")


def test_turns_are_the_tasks_own() -> None:
    task: MultiTurnTask = mixture(a=Answers("x"), b=Talks("y"))
    alone, talking = Prompt("a/0", "x0"), Prompt("b/0", "y0")
    assert (task.max_turns(alone), task.max_turns(talking)) == (1, 4)
    assert task.step(talking, TALK).reply == "y 0"
    assert task.score_conversation(talking, TALK) == 0.25
    with pytest.raises(TypeError, match="'a/0' has no turns"):
        task.step(alone, TALK)


def test_a_task_without_prompts_is_named() -> None:
    with pytest.raises(TaskError, match="the task 'b' has no prompts to train on"):
        mixture(a=Answers("x"), b=Answers("y", 0)).prompts("train")


def copies(**more: Any) -> dict[str, Any]:
    return {"name": "copy", "args": {"digits": 2, "num_prompts": 9, "holdout": 2}, **more}


def config(*tasks: dict[str, Any], **more: Any) -> Config:
    data = small_config().model_dump(mode="json", exclude_none=True)
    return parse_config(data | {"task": {"tasks": list(tasks), **more}})


def test_a_mixture_is_built_from_its_tables(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def half(prompt, completion):\n    return 0.5\n", encoding="utf-8")
    longer = copies(label="longer", weight=3, reward=f"{own}:half")
    longer["args"]["digits"] = 3
    resolved = config(copies(), longer)
    assert resolved.task.weights == {"copy": 1.0, "longer": 3.0}
    assert parse_config(resolved.model_dump(mode="json", exclude_none=True)) == resolved
    task = build_task(resolved.task, seed=1)
    summary = check_task(task)
    assert (summary.num_train, summary.num_eval) == (14, 4)
    by_label = {label_of(p.prompt_id): p for p in task.prompts("train")}
    assert by_label["copy"].reference is not None
    assert task.score(by_label["copy"], by_label["copy"].reference) == 1.0
    assert task.score(by_label["longer"], "") == 0.5  # the reward of its own


def test_the_reward_of_the_section_scores_tasks_without_one(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def half(prompt, completion):\n    return 0.5\n", encoding="utf-8")
    (tmp_path / "d.jsonl").write_text('{"prompt": "no answer"}\n', encoding="utf-8")
    lines = {"name": "jsonl", "args": {"path": str(tmp_path / "d.jsonl")}}
    task = build_task(config(copies(), lines, reward=f"{own}:half").task, seed=1)
    assert {task.score(prompt, "") for prompt in task.prompts("train")} == {0.5}


@pytest.mark.parametrize(
    ("tasks", "more", "words"),
    [
        ([copies(), copies()], {}, "task: two of tasks have the label 'copy'; give them labels"),
        ([copies(weight=0)], {}, r"task.tasks.0.weight = 0: Input should be greater than 0"),
        ([copies(wieght=1)], {}, "unknown key 'task.tasks.0.wieght'; did you mean 'weight'"),
        ([copies(label="a/b")], {}, "task.tasks.0: label = 'a/b' is not a word of letters"),
        ([copies()], {"name": "copy"}, r"task: give either name and args .* or one \[\[task.tasks"),
        ([copies()], {"args": {"digits": 2}}, r"task: give either name and args"),
        ([], {"name": "mixture"}, r"task: give either name and args"),
        ([{"name": "mixture"}], {}, 'task.tasks.0: name = "mixture" is refused'),
        ([{"args": {}}], {}, "task.tasks.0.name is missing"),
    ],
)
def test_a_wrong_mixture_names_field_value_and_way_out(
    tasks: list[dict[str, Any]], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config(*tasks, **more)


def test_a_mistake_within_a_task_says_in_which() -> None:
    wrong = config(copies(), copies(label="other") | {"args": {"digit": 2}})
    with pytest.raises(TaskError, match=r"'other' of task\.tasks: unknown key .*digit; did"):
        build_task(wrong.task, seed=1)


def test_a_task_of_ones_own_is_labelled_by_its_object() -> None:
    tasks = TaskConfig.model_validate({"tasks": ({"name": "a/b.py:Doubles"},)}).tasks
    assert [task.key for task in tasks] == ["Doubles"]
