"""`ratchet run` with real processes, gloo and a real model: what the ledgers and logs prove."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from tests.helpers.command import Command, json_lines
from tests.helpers.config import small_config
from tests.helpers.doors import are_loopback, doors
from transformers import AutoModelForCausalLM

from ratchet.observability.metrics import read_metrics
from ratchet.storage.versions import read_versions

pytestmark = pytest.mark.timeout(240)

NUM_STEPS = 40
CONFIG = small_config(
    # generation and training cost about the same here, so that they can be seen to overlap
    rollout={"max_tokens": 28, "group_size": 8, "num_workers": 1},
    buffer={"batch_groups": 8, "max_staleness": 3},
    trainer={"num_steps": NUM_STEPS, "lr": 2e-3, "lr_warmup_steps": 5},
    eval={"num_prompts": 32},
)


class Finished:
    """A run that has ended, its files, and what each of its processes has listened at."""

    def __init__(
        self, directory: Path, code: int, output: str, doors: dict[str, list[tuple[str, int]]]
    ) -> None:
        self.directory = directory
        self.doors = doors
        self.code = code
        self.output = output
        self.metrics = read_metrics(directory / "metrics.jsonl")
        self.versions = list(read_versions(directory / "versions.sqlite"))
        self.summary: dict[str, Any] = msgspec.json.decode(
            (directory / "summary.json").read_bytes()
        )

    def events(self, role: str, event: str) -> list[dict[str, Any]]:
        lines = json_lines(self.directory / "logs" / f"{role}.jsonl")
        return [line for line in lines if line["event"] == event]

    def sql(self, query: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.directory}/ledger.sqlite?mode=ro", uri=True) as ledger:
            return ledger.execute(query).fetchall()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("run") / "copy"
    with Command(CONFIG, directory) as command:
        command.until("a second step", lambda: len(command.steps()) >= 2)
        names = ("registry", "buffer", "trainer-0", "rollout-0")
        found = {name: doors([psutil.Process(command.child(name))]) for name in names}
        found["all"] = doors(command.family())
        code, output = command.finish(200)
    assert code == 0, output
    return Finished(directory, code, output, found)


def test_it_says_what_it_did(run: Finished) -> None:
    for step in (1, NUM_STEPS):
        assert f"step {step}/{NUM_STEPS}" in run.output
    assert "where to look next" in run.output
    assert run.summary["status"] == "finished"
    assert [m["step"] for m in run.metrics] == list(range(1, NUM_STEPS + 1))
    assert {"step", "version", "reward_mean", "buffer/staleness_mean", "buffer/queue_groups",
            "trainer_busy_share", "rollout_busy_share"} <= run.metrics[0].keys()  # fmt: skip


def test_it_opened_nothing_but_the_trainers_way_for_weights(run: Finished) -> None:
    found = run.doors
    assert are_loopback(found["all"]), found
    assert found["registry"] == found["buffer"] == []  # they have Unix sockets
    assert found["trainer-0"]
    assert len(found["all"]) == len(found["trainer-0"]) + len(found["rollout-0"])


def test_versions_only_move_forward_without_gaps(run: Finished) -> None:
    assert [v.version for v in run.versions] == list(range(NUM_STEPS + 1))
    assert {v.state for v in run.versions} == {"live"}
    assert [v.step for v in run.versions] == list(range(NUM_STEPS + 1))
    assert [v.parent for v in run.versions] == [None, *range(NUM_STEPS)]


def test_the_engines_digest_is_the_trainers_after_each_sync(run: Finished) -> None:
    sent = {e["version"]: e["digest"] for e in run.events("trainer-0", "weights_published")}
    loaded = {e["version"]: e["digest"] for e in run.events("rollout-0", "weights_loaded")}
    assert sent == loaded == {v.version: v.digest for v in run.versions}
    assert len(set(sent.values())) == NUM_STEPS + 1


def test_it_is_asynchronous(run: Finished) -> None:
    later = run.metrics[5:]
    busy = [m["trainer_busy_share"] + m["rollout_busy_share"] for m in later]
    assert sum(busy) / len(busy) > 1.0  # one after the other they have 1 at the most
    assert sum(m["buffer/two_version_rollouts"] for m in later) > 0


def test_staleness_is_there_and_never_past_the_bound(run: Finished) -> None:
    ((highest, lowest),) = run.sql(
        "SELECT max(staleness), min(staleness) FROM groups WHERE state IN ('trained', 'committed')"
    )
    assert lowest >= 0
    assert 0 < highest <= CONFIG.buffer.max_staleness
    # the same from first principles: the step that trained it, minus the step of its oldest token
    steps = {v.version: v.step for v in run.versions}
    rows = run.sql(
        "SELECT staleness, trained_step, min_version, max_version FROM groups"
        " WHERE state IN ('trained', 'committed')"
    )
    assert all(stale == step - 1 - steps[oldest] for stale, step, oldest, _ in rows)
    assert any(oldest != newest for _, _, oldest, newest in rows)


def test_each_prompt_is_trained_at_most_once_an_epoch(run: Finished) -> None:
    assert (
        run.sql(
            "SELECT prompt_id FROM groups WHERE state IN ('trained', 'committed')"
            " GROUP BY prompt_id, epoch HAVING count(*) > 1"
        )
        == []
    )
    ((trained,),) = run.sql("SELECT count(*) FROM groups WHERE state IN ('trained', 'committed')")
    assert trained == NUM_STEPS * CONFIG.buffer.batch_groups


def test_evaluations_are_pinned_to_the_first_and_the_last_version(run: Finished) -> None:
    before, after = run.summary["eval_before"], run.summary["eval_after"]
    assert (before["version"], before["num_prompts"]) == (0, 32)
    assert (after["version"], after["num_prompts"]) == (NUM_STEPS, 32)


def test_the_model_at_the_end_loads_and_is_not_the_first(run: Finished) -> None:
    first = AutoModelForCausalLM.from_pretrained(run.directory / "base").state_dict()
    last = AutoModelForCausalLM.from_pretrained(run.directory / "model").state_dict()
    assert first.keys() == last.keys()
    assert not any(torch.equal(first[name], last[name]) for name in first)


@pytest.mark.parametrize("what", ["versions", "groups"])
def test_the_ledgers_are_printed_as_json(run: Finished, what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ratchet.cli", what, str(run.directory), "--json"],
        capture_output=True,
        check=True,
    )
    rows = [msgspec.json.decode(line) for line in done.stdout.splitlines()]
    if what == "versions":
        assert [(r["version"], r["state"]) for r in rows] == [
            (v.version, "live") for v in run.versions
        ]
        assert {"term", "step", "parent", "digest"} <= rows[0].keys()
    else:
        assert [r["group"] for r in rows] == list(range(len(rows)))
        assert {"prompt", "epoch", "attempt", "state", "reason", "min_version", "max_version",
                "staleness", "trained_step", "reward_mean"} <= rows[0].keys()  # fmt: skip


def test_the_trace_of_a_message_is_found_in_the_logs_of_others(run: Finished) -> None:
    updated = run.events("registry-0", "version_updated")[3]
    loaded = run.events("rollout-0", "weights_loaded")[3]
    assert updated["version"] == loaded["version"] == 3
    assert updated["trace_id"]
