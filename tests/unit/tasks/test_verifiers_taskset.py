"""Tasksets of the verifiers library (from 0.4 on): on the library itself where that is installed,
else on a fake of what is used of it (`tests.helpers.fake_verifiers`).
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers import fake_verifiers

from ratchet.config import TaskConfig
from ratchet.errors import RewardFailed, TaskError
from ratchet.tasks.base import MultiTurnTask, Task
from ratchet.tasks.problems import check_task
from ratchet.tasks.registry import build_task
from ratchet.types import Prompt

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, of which there are some

TASKSET = """
import random
import verifiers.v1 as vf

__all__ = ["Sums"]

class SumData(vf.TaskData):
    answer: str

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace):
        assert [m.role for m in trace.messages][-2:] == ["user", "assistant"]
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.01)
    async def level(self, task, trace):
        return task.idx

class Broken(SumTask):
    @vf.reward
    async def right(self, trace):
        raise RuntimeError("no score today")

class InSandbox(SumTask):
    @vf.reward
    async def right(self, trace, runtime):
        return 1.0

class Prepared(SumTask):
    async def setup(self, trace, runtime):
        return None

class Silent(vf.Task[SumData]):
    pass

class Boxed(SumTask):
    NEEDS_CONTAINER = True

class SumsConfig(vf.TasksetConfig):
    size: int = 6
    kind: str = "SumTask"
    words: str | None = None
    drawn: bool = False

KIND = "SumTask"

class Sums(vf.Taskset[SumTask, SumsConfig]):
    INFINITE = False

    @classmethod
    def task_type(cls):
        return globals()[KIND]

    def load(self):
        for n in range(self.config.size):
            n = random.randrange(10**6) if self.config.drawn else n
            prompt = [vf.UserMessage(content=f"{n}+1")] if n % 2 else f"{n}+1"
            data = SumData(prompt=prompt, answer=str(n + 1), system_prompt=self.config.words)
            yield globals()[KIND](data, self.config.task)
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_verifiers.install_tasksets(monkeypatch)
    write(tmp_path, "SumTask")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("ratchet_sums", None)


def write(folder: Path, kind: str, more: str = "") -> None:
    text = TASKSET.replace('KIND = "SumTask"', f"KIND = {kind!r}") + more
    (folder / "ratchet_sums.py").write_text(text, encoding="utf-8")


def build(args: dict[str, Any] | None = None, reward: str | None = None, **more: Any) -> Task:
    table = {"environment": "ratchet-sums", "args": args or {}, **more}
    return build_task(TaskConfig(name="verifiers", args=table, reward=reward), seed=3)


def test_tasks_become_prompts_and_their_rewards_score_them() -> None:
    task = build({"words": "Add."}, holdout=2)
    assert check_task(task)[:2] == (4, 2)
    prompt = next(p for p in (*task.prompts("train"), *task.prompts("eval")) if p.reference == "4")
    assert prompt.text == "Add.\n\n3+1"
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt)
    assert not isinstance(task, MultiTurnTask)
    assert task.score(travelled, " 4") == pytest.approx(1.03)  # 1.0 x right + 0.01 x level
    assert task.score(travelled, "5") == pytest.approx(0.03)


def test_a_reward_that_raises_is_no_zero(tmp_path: Path) -> None:
    write(tmp_path, "Broken")
    task = build()
    with pytest.raises(RewardFailed, match=r"the task raised .*RuntimeError: no score today"):
        task.score(task.prompts("train")[0], "1")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("InSandbox", r"scores in a sandbox \(right\); use another taskset, or give task.reward"),
        ("Silent", "has no reward; use another taskset, or give task.reward"),
        ("Prepared", r"prepares a sandbox \(`setup` or `finalize`\)"),
        ("Boxed", "needs a container: the policy here answers a prompt once"),
    ],
)
def test_what_needs_a_sandbox_is_refused(tmp_path: Path, kind: str, words: str) -> None:
    write(tmp_path, kind)
    with pytest.raises(TaskError, match=words):
        build().prompts("train")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("\nSums.INFINITE = True\n", "'ratchet-sums' has no end"),
        ("\nSums.toolsets = classmethod(lambda cls, config: [object()])\n", "has tools"),
        (
            "\nclass Duel(vf.Env): ...\n__all__.append('Duel')\n",
            "brings an environment of its own, in which several agents may play",
        ),
    ],
)
def test_what_is_more_than_a_question_is_refused(tmp_path: Path, more: str, words: str) -> None:
    write(tmp_path, "SumTask", more)
    with pytest.raises(TaskError, match=words):
        build()


def test_a_reward_of_ones_own_scores_in_place_of_the_tasks(tmp_path: Path) -> None:
    write(tmp_path, "InSandbox")
    own = tmp_path / "own.py"
    own.write_text("def half(prompt, completion):\n    return 0.5\n", encoding="utf-8")
    task = build(reward=f"{own}:half")
    assert task.score(task.prompts("train")[0], "1") == 0.5


def test_what_cannot_be_loaded_is_named() -> None:
    with pytest.raises(TaskError, match=r"'no-such-env' with .* 'no-such-env' not found"):
        build(environment="no-such-env")
    with pytest.raises(TaskError, match=r"(?s)with task\.args\.args = {'sise': 3}: .*sise"):
        build({"sise": 3})
    with pytest.raises(TaskError, match="turns = 2, and the environment 'ratchet-sums' has one"):
        build(turns=2)


def test_what_is_drawn_is_drawn_from_the_runs_seed() -> None:
    texts = [[p.text for p in build({"drawn": True}).prompts("train")] for _ in range(2)]
    assert texts[0] == texts[1]
    other = build_task(
        TaskConfig(name="verifiers", args={"environment": "ratchet-sums", "args": {"drawn": True}}),
        seed=4,
    )
    assert [prompt.text for prompt in other.prompts("train")] != texts[0]


def test_the_process_keeps_its_signal_handlers_and_scores_in_any_thread() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    task = build()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    found: list[float] = []
    prompt = task.prompts("train")[0]
    threads = [
        threading.Thread(target=lambda: found.append(task.score(prompt, "1"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1.0, 1.0, 1.0]
