"""A worker that fails in a run of one process: a new life, a new engine, and training goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.helpers.config import small_config

from ratchet import Run
from ratchet.actors.generation import GroupFailure
from ratchet.actors.rollout import RolloutActor
from ratchet.types import RolloutGroup

pytestmark = pytest.mark.timeout(180)


def test_a_worker_that_fails_is_replaced_and_the_run_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, num_ended = RolloutActor._end, 0

    def fail_once(actor: RolloutActor, ticket: int, outcome: RolloutGroup | GroupFailure) -> None:
        nonlocal num_ended
        num_ended += 1
        if num_ended == 12:
            raise ValueError("planted")
        end(actor, ticket, outcome)

    monkeypatch.setattr(RolloutActor, "_end", fail_once)
    config = small_config(trainer={"num_steps": 8})
    with Run(config, directory=tmp_path / "run", in_process=True) as run:
        metrics = list(run)
        summary = run.wait(60)
    assert summary["status"] == "finished"
    assert [m["step"] for m in metrics] == list(range(1, 9))
    log = (tmp_path / "run" / "logs" / "launcher-0.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in log]
    ended = [e["reason"] for e in events if e["event"] == "child_ended" and e["kind"] != "normal"]
    assert ended == ["rollout-0: ValueError: planted"]
    joined = [e for e in events if e["event"] == "role_joined" and e["name"] == "rollout-0"]
    assert len({e["life"] for e in joined}) == 2
