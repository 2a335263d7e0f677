"""How a training loop of one's own ends: it leaves, is replaced or too slow, or its run ends."""

from __future__ import annotations

import pytest
from tests.helpers.mini_run import MiniRun, Policy, eventually

import ratchet
from ratchet.errors import RunFailed, StaleTerm
from ratchet.messages import EndRun
from ratchet.runtime.embed import Guest
from ratchet.runtime.embed_loop import OwnBatch
from ratchet.runtime.embed_trainer import Trainer
from ratchet.status import RunStatus
from ratchet.types import RolloutGroup

pytestmark = pytest.mark.timeout(60)


def test_a_loop_that_leaves_midway_frees_its_batch_and_another_goes_on(mini: MiniRun) -> None:
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(Policy())
        taken = next(iter(trainer.batches()))
    assert mini.refs["buffer"].is_alive()
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(Policy())
        again = [group.prompt_id for batch in trainer.batches(3) for group in use(trainer, batch)]
    assert {group.prompt_id for group in taken.groups} <= set(again)


def use(trainer: Trainer, batch: OwnBatch) -> tuple[RolloutGroup, ...]:
    trainer.publish()
    return batch.groups


def test_an_exception_in_the_loop_leaves_the_run_and_is_raised(mini: MiniRun) -> None:
    def broken(run: Guest) -> None:
        trainer = run.trainer(Policy())
        for _ in trainer.batches():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), ratchet.join(mini.directory.root) as run:
        broken(run)
    eventually(lambda: not [r for r in status(mini).roles if r.role.kind == "trainer" and r.up])
    assert mini.refs["rollout-0"].is_alive()


def status(mini: MiniRun) -> RunStatus:
    with ratchet.join(mini.directory.root) as run:
        return run.status()


def test_a_trainer_that_was_replaced_is_fenced_wherever_it_stands(mini: MiniRun) -> None:
    with ratchet.join(mini.directory.root) as run:
        first = run.trainer(Policy(), name="first")
        batches = first.batches()
        next(batches)
        second = run.trainer(Policy(), name="second")
        next(iter(second.batches()))
        with pytest.raises(StaleTerm, match="another trainer has taken over"):
            first.publish()
        with pytest.raises(StaleTerm, match="another trainer has taken over"):
            next(first.batches())
        assert second.publish() == 2
    assert not mini.directory.summary.exists()  # the run goes on


def test_a_trainer_hears_of_its_successor_while_its_loop_computes(mini: MiniRun) -> None:
    with ratchet.join(mini.directory.root) as run:
        first = run.trainer(Policy(), name="first")
        next(first.batches())
        second = run.trainer(Policy(), name="second")
        next(second.batches())
        eventually(lambda: "first" not in {r.role.name for r in run.status().roles if r.up})


def test_a_loop_that_takes_too_long_fails_by_name(mini: MiniRun) -> None:
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(Policy(), loop_timeout_s=0.3, name="slow")
        next(iter(trainer.batches()))
        eventually(lambda: not [r for r in run.status().roles if r.role.name == "slow" and r.up])
        with pytest.raises(RunFailed, match=r"slow waited 0.3 s \(loop_timeout_s\) for publish"):
            trainer.publish()


def test_the_end_of_the_run_ends_the_loop(mini: MiniRun) -> None:
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(Policy())
        steps = []
        for batch in trainer.batches():
            trainer.publish()
            steps.append(batch.step)
            if batch.step == 2:
                run.end("enough")
        assert len(steps) >= 2


def test_a_failed_run_fails_the_loop(mini: MiniRun) -> None:
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(Policy())
        next(iter(trainer.batches()))
        mini.refs["registry"].tell(EndRun("rollout-0", "failed", "the disk is full"))
        eventually(lambda: not mini.refs["buffer"].is_alive())
        with pytest.raises(RunFailed, match="the disk is full"):
            trainer.publish()
