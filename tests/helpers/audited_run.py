"""The files of a run that an audit finds right, as its roles write them."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.config import small_config

from ratchet.observability.rundir import RunDirectory
from ratchet.storage.checkpoint import CheckpointFacts
from ratchet.storage.checkpoints import Checkpoints
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.versions import VersionStore

NUM_PROMPTS = 4
BATCH = 2


def write_run(root: Path) -> RunDirectory:
    """Three steps of two groups; the third was lost once, with its trainer. Six prompts of four are
    trained, one group is queued and one in flight.
    """
    run = RunDirectory(root)
    run.logs.mkdir(parents=True)
    config = small_config(
        buffer={"batch_groups": BATCH, "max_staleness": 1},
        task={"name": "copy", "args": {"digits": 3, "num_prompts": 8, "holdout": 4}},
    )
    run.config.write_text(config.to_toml())
    _write_versions(run.versions)
    ledger = GroupLedger.open(run.ledger)
    for step in (1, 2, 3):
        _batch(ledger, step)
    ledger.commit(2, 9.0)
    for row in ledger.lose(2, 3, "step_lost", 10.0):  # that trainer was lost; 4 is the next one's
        _finish(ledger, row.group_id, row.attempt, 2, requeued=True)
    _take(ledger, [4, 5], 3, 4)
    (queued, claimed) = (ledger.issue(f"p{n}", 1, 1.0) for n in (2, 3))
    for group_id in (queued, claimed):
        ledger.claim(group_id, 0, "rollout-0", 2.0)
    _finish(ledger, queued, 0, 4)
    ledger.save_cursor(1, NUM_PROMPTS)
    ledger.close()
    return run


def write_checkpoint(run: RunDirectory, version: int, step: int, term: int) -> None:
    """Write one without a file."""
    checkpoints = Checkpoints(run.checkpoints, keep=2)
    checkpoints.begin(version)
    checkpoints.finish(CheckpointFacts("r", version, step, term, "", None, 1.0))


def _write_versions(path: Path) -> None:
    store = VersionStore.open(path)
    parents: dict[int, int | None] = {0: None, 1: 0, 2: 1, 3: 2, 4: 2, 5: 4}
    steps = {0: 0, 1: 1, 2: 2, 3: 3, 4: 2, 5: 3}
    term = 0
    for version, parent in parents.items():
        if version in {0, 4}:
            term = store.acquire_term("trainer-0", f"life-{version}", 1.0)
        assert store.reserve(term, steps[version], parent, 2.0) == version
        if version != 3:
            store.commit(version, f"{version:064x}", 3.0)
    store.burn(3, "its trainer died", 3.0)
    store.close()


def _batch(ledger: GroupLedger, step: int) -> None:
    ids = [
        ledger.issue(f"p{n % NUM_PROMPTS}", n // NUM_PROMPTS, 1.0)
        for n in range(BATCH * (step - 1), BATCH * step)
    ]
    for group_id in ids:
        ledger.claim(group_id, 0, "rollout-0", 2.0)
        _finish(ledger, group_id, 0, step - 1)
    _take(ledger, ids, step, step - 1)


def _take(ledger: GroupLedger, ids: list[int], step: int, version: int) -> None:
    ledger.batch(ids, step, dict.fromkeys(ids, 0), 4.0)
    ledger.train(ids, step, version, 5.0)


def _finish(
    ledger: GroupLedger, group_id: int, attempt: int, version: int, *, requeued: bool = False
) -> None:
    ledger.finish(
        group_id,
        attempt,
        min_version=version,
        max_version=version,
        reward_mean=0.5,
        reward_std=0.5,
        num_tokens=8,
        num_rollouts=2,
        now=3.0,
        requeued=requeued,
    )
