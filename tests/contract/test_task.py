"""What every task promises, run on each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyarrow import Table, parquet

from ratchet.config import TaskConfig
from ratchet.tasks.base import Conversation, MultiTurnTask, Step, Task
from ratchet.tasks.problems import check_task
from ratchet.tasks.registry import build_task
from ratchet.types import Prompt

OWN = """
from ratchet.types import Prompt

class Doubles:
    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def prompts(self, split):
        part = range(self.size) if split == "train" else range(self.size, self.size + 3)
        return [Prompt(prompt_id=str(n), text=f"2x{n}=", reference=str(2 * n)) for n in part]

    def score(self, prompt, completion):
        return float(completion == prompt.reference)
"""

SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "copy": {"name": "copy", "args": {"digits": 3, "num_prompts": 50, "holdout": 9}},
    "dataset": {"name": "dataset", "args": {"path": "{tmp}/data.parquet", "holdout": 0.4}},
    "guess": {"name": "guess", "args": {"highest": 30, "num_prompts": 50, "holdout": 9}},
    "jsonl": {"name": "jsonl", "args": {"path": "{tmp}/data.jsonl", "holdout": 0.4}},
    "reasoning-gym": {
        "name": "reasoning-gym",
        "args": {"dataset": "chain_sum", "size": 80, "prompt": "expression", "config": SUMS},
    },
    "reasoning-gym-question": {
        "name": "reasoning-gym",
        "args": {"dataset": "gcd", "size": 30, "holdout": 5},
    },
    "mixture": {
        "tasks": [
            {"name": "copy", "args": {"digits": 2, "num_prompts": 20, "holdout": 4}, "weight": 3},
            {"name": "{tmp}/own.py:Doubles", "args": {"size": 7}},
            {"name": "guess", "args": {"highest": 9, "num_prompts": 9, "holdout": 3}},
        ],
    },
    "own": {"name": "{tmp}/own.py:Doubles", "args": {"size": 7}},
}


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TaskConfig:
    folder = tmp_path_factory.mktemp("task")
    (folder / "own.py").write_text(OWN, encoding="utf-8")
    rows = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(30)]
    (folder / "data.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(rows))
    parquet.write_table(Table.from_pylist(rows), folder / "data.parquet")
    encoded = msgspec.json.encode(CONFIGS[request.param]).replace(b"{tmp}", str(folder).encode())
    return TaskConfig.model_validate_json(encoded)


@pytest.fixture(scope="module")
def task(config: TaskConfig) -> Task:
    return build_task(config, seed=4)


def test_ids_are_unique_and_no_problem_is_in_both_splits(task: Task) -> None:
    summary = check_task(task)
    assert summary.num_train == len(task.prompts("train")) > 0
    assert summary.num_eval == len(task.prompts("eval")) > 0


def test_the_reference_earns_the_highest_reward(task: Task) -> None:
    for split in ("train", "eval"):
        for prompt in task.prompts(split):
            assert prompt.reference is not None
            assert task.score(prompt, prompt.reference) == 1.0
            assert task.score(prompt, prompt.reference + "7") < 1.0
            assert task.score(prompt, "") < 1.0


def test_a_prompt_that_travelled_is_scored_alike(task: Task, config: TaskConfig) -> None:
    prompt = task.prompts("train")[-1]
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt)
    assert travelled == prompt
    scorer = build_task(config, seed=4)  # in another process, that never asks for prompts
    assert travelled.reference is not None
    assert scorer.score(travelled, travelled.reference) == 1.0
    assert scorer.score(travelled, "-") == task.score(prompt, "-")


def test_turns_end_and_any_process_may_take_the_next_one(task: Task, config: TaskConfig) -> None:
    if not isinstance(task, MultiTurnTask):
        return  # a task of one turn
    other = build_task(config, seed=4)
    assert isinstance(other, MultiTurnTask)
    with_turns = [prompt for prompt in task.prompts("eval") if task.max_turns(prompt) > 1]
    assert with_turns
    for prompt in with_turns:
        turns, replies, state = ("-",), (), None
        while True:
            said = Conversation(turns, replies, state, seed=7)
            travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(said), type=Conversation)
            step = other.step(prompt, travelled)
            assert step == task.step(prompt, said)
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(step), type=Step) == step
            if step.reply is None or len(turns) == task.max_turns(prompt):
                break
            last = len(turns) + 1 == task.max_turns(prompt)
            turns = (*turns, (prompt.reference or "") if last else "-")
            replies, state = (*replies, step.reply), step.state
        assert len(turns) <= task.max_turns(prompt)
        reward = task.score_conversation(prompt, said)
        assert other.score_conversation(prompt, travelled) == reward
        right = Conversation((prompt.reference or "",), seed=7)
        assert reward < task.score_conversation(prompt, right) == 1.0


OTHER_PROCESS = """
import sys, msgspec
from ratchet.config import TaskConfig
from ratchet.tasks.registry import build_task
task = build_task(TaskConfig.model_validate_json(sys.stdin.buffer.read()), seed=4)
pair = [list(task.prompts(split)) for split in ("train", "eval")]
sys.stdout.buffer.write(msgspec.msgpack.encode(pair))
"""


def test_every_process_builds_the_same_prompts(task: Task, config: TaskConfig) -> None:
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS],
        input=msgspec.json.encode(config.model_dump(exclude_defaults=True)),
        env={**os.environ, "PYTHONHASHSEED": "1234"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=True,
        timeout=60,
    )
    train, held_out = msgspec.msgpack.decode(done.stdout, type=tuple[list[Prompt], list[Prompt]])
    assert train == list(task.prompts("train"))
    assert held_out == list(task.prompts("eval"))
