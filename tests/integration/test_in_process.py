"""`Run` as an object in this process: own rewards, iteration, a user's failing code, the end."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from tests.helpers.config import small_config

from ratchet import Run
from ratchet.errors import ConfigError
from ratchet.observability.metrics import read_metrics
from ratchet.storage.ledger import read_groups
from ratchet.types import Prompt

pytestmark = pytest.mark.timeout(180)


def test_a_reward_that_raises_is_a_failed_group_and_the_run_goes_on(tmp_path: Path) -> None:
    calls = iter(range(10**9))
    lock = threading.Lock()

    def reward(prompt: Prompt, completion: str) -> float:
        with lock:
            call = next(calls)
        if call % 40 == 7:
            raise ValueError("cannot judge this")
        return float("nan") if call % 40 == 19 else float(len(completion))

    config = small_config(trainer={"num_steps": 6}, eval={"num_prompts": 4})
    with Run(config, directory=tmp_path / "run", reward=reward, in_process=True) as run:
        metrics = list(run)
        summary = run.wait(60)
    assert [m["step"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert summary["status"] == "finished"
    assert summary["eval_after"]["version"] == 6
    groups = list(read_groups(tmp_path / "run" / "ledger.sqlite"))
    failed = [g for g in groups if g.reason in {"reward_raised", "reward_invalid"}]
    assert len(failed) >= 3
    assert {g.state for g in failed} == {"dropped"}
    assert all(g.state not in {"trained", "committed"} for g in failed)
    log = (tmp_path / "run" / "logs" / "launcher-0.jsonl").read_text().splitlines()
    details = [json.loads(line)["detail"] for line in log if '"group_failed"' in line]
    assert any("ValueError: cannot judge this" in detail for detail in details)
    assert any("nan" in detail for detail in details)
    loaded = [json.loads(line)["digest"] for line in log if '"weights_loaded"' in line]
    sent = [json.loads(line)["digest"] for line in log if '"weights_published"' in line]
    assert loaded == sent
    assert len(set(sent)) == 7


def test_stop_finishes_the_step_and_writes_the_model(tmp_path: Path) -> None:
    config = small_config(trainer={"num_steps": 100_000})
    with Run(config, directory=tmp_path / "run", in_process=True) as run:
        for metrics in run:
            if metrics["step"] == 3:
                run.stop()
        summary = run.wait(60)
    assert summary["status"] == "stopped"
    assert summary["steps"] >= 3
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_a_trained_model_is_restored_and_trained_on(tmp_path: Path) -> None:
    """With the model that the runs of processes which are killed and resumed do without."""
    config = small_config(trainer={"num_steps": 5}, checkpoint={"every_steps": 2})
    directory = tmp_path / "run"
    with Run(config, directory=directory, in_process=True) as run:
        run.wait(60)
    model = (directory / "model" / "model.safetensors").read_bytes()
    with Run.resume(directory, overrides=["trainer.num_steps=7"], in_process=True) as run:
        summary = run.wait(60)
    assert (summary["status"], summary["steps"]) == ("finished", 7)
    assert [m["step"] for m in read_metrics(directory / "metrics.jsonl")] == list(range(1, 8))
    log = map(json.loads, (directory / "logs" / "launcher-0.jsonl").read_text().splitlines())
    (restored,) = (event for event in log if event["event"] == "restored")
    assert restored["step"] in {4, 5}
    assert (directory / "model" / "model.safetensors").read_bytes() != model


def test_a_reward_that_no_other_process_can_import_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in_process=True"):
        Run(small_config(), directory=tmp_path / "run", reward=lambda prompt, completion: 0.0)
    assert not (tmp_path / "run").exists()


def test_waiting_for_a_run_that_was_not_started_is_refused(tmp_path: Path) -> None:
    run = Run(small_config(), directory=tmp_path / "run")
    with pytest.raises(RuntimeError, match="not started"):
        run.wait()
    with pytest.raises(RuntimeError, match="not started"):
        iter(run)


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    Run(small_config(), directory=tmp_path / "run")
    with pytest.raises(ConfigError, match="exists already"):
        Run(small_config(), directory=tmp_path / "run")
