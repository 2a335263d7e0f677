"""kill -9 of a whole run, again and again: it goes on, and each prompt counts once an epoch."""

from __future__ import annotations

import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from tests.helpers.command import Command, gone, kill
from tests.helpers.light_run import light_config
from typer.testing import CliRunner

from ratchet import cli_audit
from ratchet.storage.ledger import read_groups
from ratchet.storage.versions import read_versions

pytestmark = pytest.mark.timeout(240)

NUM_STEPS = 22
CONFIG = light_config(
    task={"name": "copy", "args": {"digits": 3, "num_prompts": 40, "holdout": 14}},
    rollout={"max_tokens": 5, "group_size": 4},
    trainer={"num_steps": NUM_STEPS, "lr": 1e-3},
    checkpoint={"every_steps": 3, "keep": 2},
)


def die_after(command: Command, num_steps: int) -> None:
    """Kill the launcher, and with it all, at a step."""
    command.until(f"step {num_steps}", lambda: len(command.steps()) >= num_steps)
    family = command.family()
    kill(command.process.pid, signal.SIGKILL)
    command.finish(10.0)
    assert gone(family[1:], 15.0) == []


def test_a_run_that_is_killed_again_and_again_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Command(CONFIG, root) as command:
        die_after(command, 5)
    with Command(None, root) as command:  # from step 3
        die_after(command, 14)
    with Command(None, root) as command:  # from step 12, or 9
        code, output = command.finish()
    assert code == 0, output
    assert "step 3/" not in output  # what an earlier life has shown

    steps = [line["step"] for line in command.steps()]
    assert steps == list(range(1, NUM_STEPS + 1))
    versions = list(read_versions(root / "versions.sqlite"))
    assert [v.version for v in versions] == list(range(len(versions)))
    assert versions[-1].step == NUM_STEPS
    assert {v.term for v in versions} == {1, 2, 3}
    result = CliRunner().invoke(cli_audit.app, ["audit", str(root)])
    assert result.exit_code == 0, result.output

    groups = list(read_groups(root / "ledger.sqlite"))
    kept = {int(path.stem) for path in (root / "payloads").iterdir()}
    assert kept == {group.group_id for group in groups if group.state == "finished"}
    with closing(sqlite3.connect(root / "ledger.sqlite")) as sql:
        query = "SELECT count(*) FROM events WHERE event = 'requeued'"
        assert sql.execute(query).fetchone()[0] > 0, "nothing came back from its payload"
    trained = [group for group in groups if group.state in {"trained", "committed"}]
    assert Counter(g.trained_step for g in trained) == dict.fromkeys(steps, 4)
    assert len(trained) == 4 * NUM_STEPS
    ended = {"trained", "committed", "dropped"}
    ends = Counter((g.epoch, g.prompt_id) for g in groups if g.state in ended)
    assert set(ends.values()) == {1}
    whole_epochs = {g.epoch for g in groups} - {max(g.epoch for g in groups)}
    open_epochs = {g.epoch for g in groups if g.state not in ended}
    for epoch in whole_epochs - open_epochs:
        assert len([1 for of, _ in ends if of == epoch]) == 26


@pytest.mark.soak
def test_what_must_not_change_is_refused_and_what_may_is_told(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Command(CONFIG, root) as command:
        die_after(command, 4)
    files = sorted(path.name for path in root.iterdir())
    with Command(None, root, "--set", "rollout.group_size=2") as command:
        code, output = command.finish()
    assert code == 2, output
    assert "rollout.group_size is 2 now and was 4" in output
    assert sorted(path.name for path in root.iterdir()) == files
    changes = ("--set", "trainer.lr=0.0005", "--set", "trainer.num_steps=6")
    with Command(None, root, "--step", "3", *changes) as command:
        code, output = command.finish()
    assert code == 0, output
    (changed, _) = sorted(command.events("launcher-0", "config_changed"), key=lambda e: e["field"])
    told = (changed["field"], changed["now"], changed["before"])
    assert told == ("trainer.lr", "0.0005", "0.001")
    assert [line["step"] for line in command.steps()] == list(range(1, 7))
