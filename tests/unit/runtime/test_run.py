"""`Run` as an object: what it refuses, how a reward is named, how it ends."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.config import small_config

from ratchet import Run, cli
from ratchet.errors import ConfigError, RunFailed, TaskError, UserError
from ratchet.imports import import_object
from ratchet.runtime.prepare import check_run, with_fingerprint
from ratchet.runtime.role import RoleOutcome
from ratchet.tasks.registry import load_reward
from ratchet.types import Prompt

if TYPE_CHECKING:
    from tests.helpers.scripted_supervisor import Supervisor

ROOT = Path(__file__).parents[3]


def half(prompt: Prompt, completion: str) -> float:
    return 0.5


class Judge:
    @staticmethod
    def judge(prompt: Prompt, completion: str) -> float:
        return 0.5


# --- rewards


def test_a_reward_of_a_module_is_named_so_that_another_process_finds_it(tmp_path: Path) -> None:
    run = Run(small_config(), directory=tmp_path / "run", reward=half)
    reference = run.config.task.reward
    assert reference is not None
    assert reference.endswith(":half")
    assert run.directory.load_config().task.reward == reference
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from ratchet.tasks.registry import load_reward;"
            "print(load_reward(sys.argv[1])(None, ''))",
            reference,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "0.5", done.stderr


def test_a_reward_of_a_file_beside_the_script_is_named_by_its_path(tmp_path: Path) -> None:
    """The other process starts elsewhere: a bare module name would say nothing to it."""
    file = tmp_path / "my_rewards.py"
    file.write_text("def good(prompt, completion):\n    return 1.0\n")
    reward = load_reward(f"{file}:good")
    run = Run(small_config(), directory=tmp_path / "run", reward=reward)
    assert run.config.task.reward == f"{file}:good"


SCRIPT = """
import sys
from pathlib import Path
from tests.helpers.config import small_config
from ratchet import Run

def mine(prompt, completion):
    return 0.25

if __name__ == "__main__":
    run = Run(small_config(), directory=Path(sys.argv[1]), reward=mine)
    print(run.config.task.reward)
"""


def python(*args: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_reward_of_a_script_is_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python(str(tmp_path / "script.py"), str(tmp_path / "run"))
    assert done.stdout.strip() == f"{tmp_path}/script.py:mine", done.stderr
    reward = import_object(done.stdout.strip())
    assert callable(reward)
    assert reward(None, "") == 0.25


@pytest.mark.parametrize("typed", ["-", "-c"])
def test_a_reward_typed_into_a_session_is_refused(tmp_path: Path, typed: str) -> None:
    code = [SCRIPT] if typed == "-c" else []
    done = python(typed, *code, str(tmp_path / "run"), text=SCRIPT)
    assert "ConfigError: a reward that was typed into a notebook" in done.stderr
    assert "in_process=True" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "reward", [lambda p, c: 0.0, Judge.judge, math.fsum], ids=lambda reward: reward.__qualname__
)
def test_a_reward_that_cannot_be_imported_or_called_is_refused(tmp_path: Path, reward: Any) -> None:
    with pytest.raises(UserError):
        Run(small_config(), directory=tmp_path / "run", reward=reward)
    assert not (tmp_path / "run").exists()


def test_in_process_any_callable_is_a_reward(tmp_path: Path) -> None:
    run = Run(small_config(), directory=tmp_path / "run", reward=lambda p, c: 0.75, in_process=True)
    assert run.config.task.reward is None
    task = run._task
    assert task.score(task.prompts("train")[0], "") == 0.75


def test_in_process_a_reward_of_completions_does_not_score_conversations(tmp_path: Path) -> None:
    config = small_config(task={"name": "guess", "args": {"holdout": 4}})
    with pytest.raises(
        TaskError, match=r"reward = <function .* 'guess' is a task of several turns"
    ):
        Run(config, directory=tmp_path / "run", reward=lambda p, c: 0.75, in_process=True)
    assert not (tmp_path / "run").exists()


def test_in_process_a_reward_needs_no_answers_and_leaves_a_parts_own_alone(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def half(prompt, completion):\n    return 0.5\n")
    (tmp_path / "data.jsonl").write_text('{"prompt": "1>"}\n{"prompt": "2>"}\n')
    parts = [
        {"name": "jsonl", "args": {"path": str(tmp_path / "data.jsonl")}},
        {"name": "copy", "args": {"digits": 2, "holdout": 4}, "reward": f"{tmp_path}/own.py:half"},
    ]
    data = small_config(warm_start={"steps": 0}, eval={"num_prompts": 0}).model_dump(mode="json")
    data["task"] = {"tasks": parts}
    run = Run(data, directory=tmp_path / "run", reward=lambda p, c: 0.75, in_process=True)
    task = run._task
    scores = {p.prompt_id.partition("/")[0]: task.score(p, "") for p in task.prompts("train")}
    assert scores == {"jsonl": 0.75, "copy": 0.5}


# --- what it is made from


def test_a_reward_of_this_process_cannot_be_asked_to_run_in_others(tmp_path: Path) -> None:
    config = small_config(task={"reward_isolation": "process"})
    with pytest.raises(ConfigError, match='reward_isolation = "process": no process can import'):
        Run(config, directory=tmp_path / "run", reward=lambda *_: 1.0, in_process=True)
    assert not (tmp_path / "run").exists()


def test_data_a_config_and_a_file_are_the_same_run(tmp_path: Path) -> None:
    config = small_config(trainer={"num_steps": 7})
    (tmp_path / "job.toml").write_text(config.to_toml())
    data = config.model_dump(mode="json", exclude_none=True)
    found = [Run(config, directory=tmp_path / "a"), Run(data, directory=tmp_path / "b")]
    found.append(Run(tmp_path / "job.toml", directory=tmp_path / "c"))
    assert found[0].config.task.fingerprint
    assert [run.config for run in found] == [with_fingerprint(config, check_run(config))] * 3
    assert len({run.run_id for run in found}) == 3
    run = Run(tmp_path / "job.toml", directory=tmp_path / "d", overrides=["trainer.num_steps=9"])
    assert run.config.trainer.num_steps == 9
    with pytest.raises(ConfigError, match="overrides go with the path"):
        Run(config, directory=tmp_path / "e", overrides=["trainer.num_steps=9"])


def test_a_mistake_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Run(small_config(rollout={"max_tokens": 64}), directory=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_a_guest_has_failed_has_failed(
    tmp_path: Path, supervisor: type[Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "outcome", RoleOutcome("run_failed", "my loop: no memory"))
    run = Run(small_config(), directory=tmp_path / "run", roles=("registry", "buffer"))
    asyncio.run(run.run())
    with pytest.raises(RunFailed, match="my loop: no memory"):
        run.result()


# --- how it ends


def test_a_run_that_is_told_to_stop_at_once_stops(
    tmp_path: Path, supervisor: type[Supervisor]
) -> None:
    run = Run(small_config(), directory=tmp_path / "run")
    run.stop()  # before there is a loop to tell
    run.start()
    assert run.wait(30) == {"status": "stopped", "reason": "stop", "steps": None}
    run.stop()  # and after there is none any more


def test_a_stop_in_the_middle_and_an_exception_in_the_block(
    tmp_path: Path, supervisor: type[Supervisor]
) -> None:
    with Run(small_config(), directory=tmp_path / "a") as run:
        run.stop()
    assert run.wait()["reason"] == "stop"
    with (
        pytest.raises(ZeroDivisionError),
        Run(small_config(), directory=tmp_path / "b") as run,
    ):
        raise ZeroDivisionError
    assert run.wait()["reason"] == "kill"
    assert not [t for t in threading.enumerate() if t.name == "ratchet-run" and t.is_alive()]


def test_waiting_has_an_end_and_the_run_goes_on(
    tmp_path: Path, supervisor: type[Supervisor]
) -> None:
    with Run(small_config(), directory=tmp_path / "run") as run:
        with pytest.raises(TimeoutError, match="not ended within 0"):
            run.wait(0)
        with pytest.raises(RuntimeError, match="has not ended"):
            run.result()
        run.stop()


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [
        (RoleOutcome("user_error", "task.name = 'x': gone"), UserError, "task.name = 'x': gone"),
        (RoleOutcome("failed", "buffer ended: x"), RunFailed, "buffer ended: x"),
        (OSError("no more processes"), OSError, "no more processes"),
    ],
)
def test_the_first_cause_is_raised(
    tmp_path: Path,
    supervisor: type[Supervisor],
    monkeypatch: pytest.MonkeyPatch,
    outcome: Any,
    error: type[Exception],
    words: str,
) -> None:
    monkeypatch.setattr(supervisor, "outcome", outcome)
    with (
        pytest.raises(error, match=words),
        Run(small_config(), directory=tmp_path / "run") as run,
    ):
        run.wait(30)


def test_a_finished_run_gives_the_trainers_summary(
    tmp_path: Path, supervisor: type[Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "outcome", RoleOutcome("stopped"))
    run = Run(small_config(), directory=tmp_path / "run")
    run.directory.summary.write_text('{"status": "finished", "steps": 3}')
    assert asyncio.run(run.run()) == RoleOutcome("stopped")
    assert run.result() == {"status": "finished", "steps": 3}


@pytest.mark.parametrize(("status", "code"), [("user_error", 2), ("failed", 1), ("stopped", 0)])
def test_the_command_ends_with_the_code_of_the_outcome(
    tmp_path: Path,
    supervisor: type[Supervisor],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    code: int,
) -> None:
    monkeypatch.setattr(supervisor, "outcome", RoleOutcome(status, "the detail"))
    (tmp_path / "job.toml").write_text(small_config().to_toml())
    arguments = ["ratchet", "run", str(tmp_path / "job.toml"), "--dir", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code
    assert ("the detail" in capsys.readouterr().err) == (code != 0)
