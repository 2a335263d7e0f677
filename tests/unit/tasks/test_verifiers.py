"""Classic environments of the verifiers library (up to 0.3): on the library itself where that is
installed, else on a fake of what is used of it (`tests.helpers.fake_verifiers`), as it brings a
hundred packages. What needs no library is in test_verifiers_missing.
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
from ratchet.tasks.base import Conversation, MultiTurnTask, Step, Task
from ratchet.tasks.problems import check_task
from ratchet.tasks.registry import build_task
from ratchet.types import Prompt

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own, of which there are some

ENVIRONMENT = '''
import random
import verifiers as vf
from datasets import Dataset

def rows(start, end):
    sums = [(n, str(n + 1), {"level": n}) for n in range(start, end)]
    return Dataset.from_list(
        [{"question": f"{n}+1", "answer": answer, "info": info} for n, answer, info in sums]
    )

def right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)

async def level(info, **kwargs):
    return info["level"]

def broken(completion):
    raise RuntimeError("no score today")

def together(completions):
    return [0.0 for _ in completions]

class Guess(vf.MultiTurnEnv):
    """Says which way to go, until the answer is right; draws what it says before that."""

    async def setup_state(self, state):
        state["mood"] = random.choice(["Hm", "Well"])
        return state

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        if said == "bye":
            state["final_env_response"] = [{"role": "user", "content": "bye"}]
            return state["final_env_response"]
        mood = state["mood"] if said != "any" else random.SystemRandom().random()
        return [{"role": "user", "content": f"{mood}, not {said}"}]

    @vf.stop
    async def found(self, state):
        turns = state["trajectory"]
        return bool(turns) and turns[-1]["completion"][-1]["content"] == state["answer"]

def load_environment(kind="single", size=6, evaluation=0, functions=("right", "level"), **kwargs):
    functions = [globals()[name] for name in functions]
    rubric = vf.Rubric(funcs=functions, weights=[1.0, 0.01][: len(functions)])
    kwargs |= {"dataset": rows(0, size), "rubric": rubric}
    if evaluation:
        kwargs["eval_dataset"] = rows(0, evaluation)
    if kind == "tools":
        return vf.ToolEnv(tools=[], **kwargs)
    return Guess(**kwargs) if kind == "guess" else vf.SingleTurnEnv(**kwargs)
'''


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    fake_verifiers.install_classic(monkeypatch)
    (tmp_path / "ratchet_guess_env.py").write_text(ENVIRONMENT, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    yield
    sys.modules.pop("ratchet_guess_env", None)


def build(args: dict[str, Any] | None = None, reward: str | None = None, **more: Any) -> Task:
    table = {"environment": "ratchet-guess-env", "args": args or {}, **more}
    return build_task(TaskConfig(name="verifiers", args=table, reward=reward), seed=3)


def build_turns(args: dict[str, Any] | None = None, **more: Any) -> MultiTurnTask:
    task = build({"kind": "guess"} | (args or {}), **more)
    assert isinstance(task, MultiTurnTask)
    return task


def test_rows_become_prompts_and_the_rubric_scores_them() -> None:
    task = build({"system_prompt": "Add."}, holdout=2)
    assert check_task(task)[:2] == (4, 2)
    prompt = next(p for p in (*task.prompts("train"), *task.prompts("eval")) if p.reference == "3")
    assert prompt.text == "Add.\n\n2+1"
    travelled = msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt)
    assert not isinstance(task, MultiTurnTask)
    assert task.score(travelled, " 3") == pytest.approx(1.02)  # 1.0 x right + 0.01 x level
    assert task.score(travelled, "4") == pytest.approx(0.02)


def test_data_for_evaluation_is_not_trained_on() -> None:
    task = build({"evaluation": 2})
    assert [prompt.text for prompt in task.prompts("eval")] == ["0+1", "1+1"]
    assert [prompt.text for prompt in task.prompts("train")] == ["2+1", "3+1", "4+1", "5+1"]
    with pytest.raises(TaskError, match=r"holdout = 2, and the environment .* leave it out"):
        build({"evaluation": 2}, holdout=2).prompts("train")
    with pytest.raises(TaskError, match="evaluates on every problem that it trains on"):
        build({"evaluation": 6}).prompts("train")


def test_a_function_that_raises_fails_the_reward_and_is_no_zero() -> None:
    task = build({"functions": ["right", "broken"]})
    with pytest.raises(RewardFailed, match="the rubric raised RuntimeError: no score today"):
        task.score(task.prompts("train")[0], "1")
    fine = build()
    assert fine.score(fine.prompts("train")[0], "1") == 1.0  # nothing is left of it


def talk(task: MultiTurnTask, prompt: Prompt, *turns: str, seed: int = 1) -> tuple[str | None, ...]:
    """Let the policy say these turns, each step in a task of its own; return the replies."""
    replies: tuple[str, ...] = ()
    for number in range(1, len(turns) + 1):
        step = task.step(prompt, Conversation(turns[:number], replies, seed=seed))
        if step.reply is None or number == len(turns):
            return (*replies, step.reply)
        replies = (*replies, step.reply)
    return replies


def test_an_environment_of_several_turns_is_played_again_in_any_process() -> None:
    task, other = (build_turns({"max_turns": 4}) for _ in range(2))
    prompt = task.prompts("train")[2]
    assert task.max_turns(prompt) == 4
    replies = talk(task, prompt, "7", "5", "3")
    assert replies[2] is None
    assert replies[0] is not None
    mood = replies[0].partition(",")[0]
    assert replies[:2] == (f"{mood}, not 7", f"{mood}, not 5")
    assert talk(other, prompt, "7", "5", "3") == replies
    moods = {talk(task, prompt, "7", seed=seed) for seed in range(8)}
    assert moods == {("Hm, not 7",), ("Well, not 7",)}
    said = Conversation(("7", "5", "3"), replies[:2], seed=1)
    assert other.score_conversation(prompt, said) == pytest.approx(1.02)
    assert task.step(prompt, Conversation(("bye",))) == Step(None)


def test_an_environment_that_says_something_else_each_time_fails() -> None:
    task = build_turns({"max_turns": 4})
    prompt = task.prompts("train")[0]
    first = task.step(prompt, Conversation(("any",))).reply
    assert first is not None
    with pytest.raises(RewardFailed, match="it must say the same each time"):
        task.step(prompt, Conversation(("any", "x"), (first,)))


def test_a_limit_on_turns_is_needed() -> None:
    with pytest.raises(TaskError, match=r"sets no limit on turns; give task\.args\.turns"):
        build({"kind": "guess"})
    task = build_turns(turns=3)
    assert task.max_turns(task.prompts("train")[0]) == 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"kind": "tools"}, "calls tools: its turns are parsed by a server"),
        ({"functions": ["together"]}, "rewards the completions of a group together"),
        ({"functions": ["nope"]}, r"with task\.args\.args = {'functions': \['nope'\]}: .*nope"),
        ({"size": 0}, "leaves nothing to train on: the task has 0 distinct problems"),
    ],
)
def test_what_cannot_be_used_is_refused(args: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError, match=words):
        build(args).prompts("train")


def test_a_reward_of_ones_own_scores_in_place_of_the_rubric(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text("def half(prompt, completion):\n    return 0.5\n", encoding="utf-8")
    task = build({"functions": ["together"]}, reward=f"{own}:half")
    assert task.score(task.prompts("train")[0], "1") == 0.5


def test_an_environment_that_is_not_installed_is_named() -> None:
    with pytest.raises(TaskError, match=r"'no-such-env' with .* Could not import 'no-such-env'"):
        build(environment="no-such-env")


def test_a_prompt_of_other_data_is_refused() -> None:
    prompt = build({"size": 6}).prompts("train")[5]
    with pytest.raises(RewardFailed, match="has another problem at row 5 in this process"):
        build({"size": 5}).score(prompt, "1")


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
