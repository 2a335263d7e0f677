"""A standby takes the place of a trainer that stands still; the old one comes back, and leaves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.command import json_lines, kill
from tests.helpers.config import small_config
from tests.helpers.launched import Site
from tests.helpers.ledgers import each_prompt_counts_once, versions_go_forward

pytestmark = [pytest.mark.timeout(300), pytest.mark.soak]

CONFIG = small_config(
    task={"name": "copy", "args": {"digits": 3, "num_prompts": 40, "holdout": 14}},
    rollout={"max_tokens": 5, "group_size": 4, "num_workers": 1},
    trainer={"num_steps": 100_000, "lr": 1e-3},
    checkpoint={"every_steps": 2, "keep": 2},
    runtime={"heartbeat_s": 0.5, "suspect_s": 1.5, "dead_s": 4.0},
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, CONFIG) as made:
        yield made


def test_a_standby_takes_over_and_the_old_trainer_is_fenced_when_it_comes_back(site: Site) -> None:
    registry = site.launch("registry")
    buffer = site.launch("buffer")
    trainer = site.launch("trainer")
    shared = str(trainer.directory)
    rollout = site.launch("rollout", "--node-rank", "0")

    def steps() -> list[int]:
        return [line["step"] for line in json_lines(trainer.directory / "metrics.jsonl")]

    trainer.until("a checkpoint", lambda: len(steps()) >= 5)
    standby = site.launch("trainer", "--standby", "--dir", shared, name="standby")
    standby.until("its place", lambda: standby.said("stands by"))
    registry.until(
        "the standby",
        lambda: [e for e in registry.events("registry-0", "role_joined") if e["kind"] == "standby"],
    )

    zombie = trainer.child("trainer-0")
    kill(zombie, signal.SIGSTOP)
    standby.until("its turn", lambda: standby.said("takes over: trainer-0 is gone"))
    assert trainer.process.poll() is None
    registry.until(
        "its term",
        lambda: [e for e in registry.events("registry-0", "term_acquired") if e["term"] == 2],
    )
    before = standby.until("a step", lambda: max(steps(), default=0))
    standby.until("more steps", lambda: max(steps()) >= before + 3)

    kill(zombie, signal.SIGCONT)
    assert trainer.finish(60) == 2, trainer.output
    assert "term 1" in trainer.last_line, trainer.output
    assert "term 2 is in force" in trainer.last_line
    after = max(steps())
    standby.until("steps after that", lambda: max(steps()) >= after + 3)

    kill(standby.process.pid, signal.SIGTERM)
    assert standby.finish(20) == 128 + signal.SIGTERM, standby.output
    assert (buffer.finish(20), rollout.finish(20), registry.finish(20)) == (0, 0, 0)
    taken = steps()
    assert taken == list(range(1, len(taken) + 1))
    versions_go_forward(registry.directory / "versions.sqlite", terms={1, 2})
    each_prompt_counts_once(buffer.directory / "ledger.sqlite", batch_groups=4, num_prompts=26)
