"""A training loop and a producer of the user's own, against real links, stores and transfers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.config import small_config
from tests.helpers.mini_run import MiniRun, Policy

import ratchet
from ratchet.backends.rollout.fake import fake_token
from ratchet.errors import AskTimeout, AuthFailed, ConfigError, RunFailed, StaleTerm, VersionError
from ratchet.messages import EndRun
from ratchet.runtime.embed import Guest
from ratchet.runtime.embed_loop import OwnBatch, Snapshot
from ratchet.runtime.embed_trainer import Trainer
from ratchet.runtime.embed_work import Work
from ratchet.status import RunStatus
from ratchet.storage.groups import GroupRow
from ratchet.storage.versions import read_versions
from ratchet.types import RolloutGroup, VersionSpan

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def mini(tmp_path: Path) -> Iterator[MiniRun]:
    with MiniRun(tmp_path) as run:
        yield run


def step(policy: Policy, value: float) -> None:
    """What an optimiser does: change the weights in place."""
    with torch.no_grad():
        policy.w.fill_(value)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    tick = threading.Event()
    while not condition():
        tick.wait(0.01)


def check_tokens(group: RolloutGroup, weights: dict[int, np.ndarray]) -> None:
    """Prove of every token that the weights of its version made it."""
    for rollout in group.rollouts:
        prompt = rollout.prompt_ids.numpy().tolist()
        for span in rollout.spans:
            for position in range(span.start, span.end):
                token, _ = fake_token(weights[span.version], prompt, rollout.seed, position)
                assert token == rollout.completion_ids.numpy()[position]


# --- the training loop


def test_each_step_has_a_version_and_every_token_is_of_the_weights_that_it_names(
    mini: MiniRun,
) -> None:
    policy, published, versions = Policy(), {0: np.zeros(4, np.float32)}, []
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(policy)
        for batch in trainer.batches(steps=8):
            assert batch.step == len(versions) + 1
            assert batch.version == len(versions)
            for group in batch.groups:
                check_tokens(group, published)
                assert batch.version - min(group.versions) <= 2
            step(policy, batch.step)
            published[batch.step] = policy.w.detach().numpy().copy()
            versions.append(trainer.publish(loss=0.5))
            step(policy, -1.0)  # whatever the loop does next, it does not reach the engines
        assert trainer.metrics["loss"] == 0.5
        assert trainer.metrics["step"] == 8
        trainer.finish()
    assert versions == list(range(1, 9))
    eventually(lambda: not mini.refs["buffer"].is_alive())
    groups = mini.groups()
    assert sum(group.state == "trained" for group in groups) == 16
    assert not [group for group in groups if group.state == "batched"]
    assert {group.trained_step for group in groups if group.state == "trained"} == {*range(1, 9)}


def test_finish_ends_the_run_and_leaves_a_summary(mini: MiniRun) -> None:
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(Policy())
        for _ in trainer.batches(steps=2):
            trainer.publish()
        trainer.finish()
    summary = mini.directory.summary.read_text()
    assert '"finished"' in summary
    assert '"steps": 2' in summary
    eventually(lambda: not mini.refs["buffer"].is_alive())
    assert len(mini.directory.metrics.read_text().splitlines()) == 2


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


def test_a_batch_is_published_or_skipped_before_the_next(mini: MiniRun) -> None:
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(Policy())
        with pytest.raises(RuntimeError, match="take one from batches"):
            trainer.publish()
        batches = trainer.batches()
        first = next(batches)
        with pytest.raises(RuntimeError, match=r"call publish\(\) after its optimiser step"):
            next(batches)
        with pytest.raises(RuntimeError, match="before finish"):
            trainer.finish()
        trainer.skip()
        second = next(trainer.batches())
        assert (first.step, second.step) == (1, 1)
        assert trainer.publish() == 1
    skipped = {group.group_id for group in first.groups}
    rows = {row.group_id: row for row in mini.groups()}
    assert {rows[group].reason for group in skipped} == {"non_finite"}
    assert not skipped & {group.group_id for group in second.groups}


def test_weights_that_are_not_finite_are_never_published(mini: MiniRun) -> None:
    policy = Policy()
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(policy)
        next(iter(trainer.batches()))
        step(policy, float("nan"))
        with pytest.raises(RunFailed, match="w is not finite after the step"):
            trainer.publish()
        step(policy, 1.0)  # restored by the loop, which may go on
        assert next(iter(trainer.batches())).step == 1
        assert trainer.publish() == 1


def test_a_model_that_is_not_finite_is_not_begun_with(mini: MiniRun) -> None:
    policy = Policy()
    step(policy, float("inf"))
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(policy)
        with pytest.raises(RunFailed, match="w is not finite: there is nothing to begin with"):
            next(iter(trainer.batches()))
    assert list(read_versions(mini.directory.versions)) == []


def test_a_model_that_the_engines_do_not_know_is_refused_at_once(mini: MiniRun) -> None:
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(Policy(size=5))
        with pytest.raises(RunFailed, match="is not the model of the engines"):
            next(iter(trainer.batches()))


def test_a_run_with_an_adapter_has_a_trainer_of_its_own(tmp_path: Path) -> None:
    build = small_config().model.model_dump(exclude_none=True)
    with (
        MiniRun(tmp_path, model=build | {"lora": {}}) as mini,
        ratchet.join(mini.directory.root) as run,
        pytest.raises(ConfigError, match=r"\[model\.lora\] cannot be trained by a loop"),
    ):
        run.trainer(Policy())


def test_an_engine_that_joins_late_gets_the_live_version(mini: MiniRun) -> None:
    policy = Policy()
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(policy)
        next(iter(trainer.batches()))
        step(policy, 1.0)
        trainer.publish()
        batch = next(iter(trainer.batches()))
        mini.start_rollout(1)  # while the loop computes, and changes its weights as it likes
        step(policy, 2.0)
        loaded = mini.log.named
        late = {"actor": "rollout-1", "version": batch.version}
        eventually(lambda: any(late.items() <= f.items() for f in loaded("weights_loaded")))
        assert trainer.publish() == 2


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


def test_the_async_twin_does_the_same(mini: MiniRun) -> None:
    async def train() -> list[int]:
        async with asyncio.timeout(30), ratchet.join_async(mini.directory.root) as run:
            trainer = await run.trainer(Policy())
            versions = [await trainer.publish() async for _ in trainer.batches(steps=3)]
            assert (await run.status()).live is not None
            await trainer.finish()
            return versions

    assert asyncio.run(train()) == [1, 2, 3]


def test_the_waits_for_the_loop_show_in_the_status(mini: MiniRun) -> None:
    with ratchet.join(mini.directory.root) as run:
        trainer = run.trainer(Policy(), name="own")
        next(iter(trainer.batches()))

        def shown() -> bool:
            rows = [row for row in run.status().roles if row.role.name == "own"]
            waits = rows[0].report.waits if rows and rows[0].report else ()
            return any("publish() or skip() of step 1" in wait.what for wait in waits)

        eventually(shown)


# --- joining


def test_join_by_address_needs_the_token(mini: MiniRun, tmp_path: Path) -> None:
    with ratchet.join(str(mini.registry), token_file=mini.token_file) as run:
        assert run.config.buffer == mini.config.buffer
        assert run.run_id == "mini"
    with pytest.raises(ConfigError, match=r"runtime\.token_file"):
        ratchet.join(str(mini.registry))
    other = tmp_path / "other"
    other.touch(mode=0o600)
    other.write_text("not the secret of that run")
    with pytest.raises(AuthFailed):
        ratchet.join(str(mini.registry), token_file=other)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not the directory of a run, nor the address"):
        ratchet.join("runs/nowhere")
    with pytest.raises(RunFailed, match=r"links\.json has not appeared within 0\.1 s"):
        ratchet.join(tmp_path, timeout_s=0.1)
    assert not [t for t in threading.enumerate() if t.name == "ratchet-guest"]


# --- the snapshot


def test_a_snapshot_keeps_what_was_taken_and_knows_tied_weights() -> None:
    module = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2)}
    )
    module["b"].weight = module["a"].weight
    snapshot = Snapshot(module)
    assert snapshot.take() is None
    before = module["a"].weight.detach().clone()
    with torch.no_grad():
        module["a"].weight.add_(1.0)
    assert torch.equal(snapshot.read(["a.weight"])[0], before)
    assert {spec.name: spec.alias_of for spec in snapshot.specs()}["b.weight"] == "a.weight"
    with torch.no_grad():
        module["b"].bias[0] = float("inf")
    assert snapshot.take() == "b.bias"
    assert torch.equal(snapshot.read(["a.weight"])[0], before)  # all or nothing


# --- the producer


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[MiniRun]:
    """A run whose engine claims one prompt at a time, and leaves some to a producer."""
    buffer = {"batch_groups": 2, "max_staleness": 9, "lease_s": 1.0, "capacity_factor": 4.0}
    rollout = {"max_concurrent_groups": 1, "group_timeout_s": 1.0}
    with MiniRun(tmp_path, buffer=buffer, rollout=rollout) as run:
        yield run


@contextlib.contextmanager
def training(run: Guest) -> Iterator[None]:
    """Take steps in a thread until the block ends, and one more."""
    enough = threading.Event()

    def train() -> None:
        trainer = run.trainer(Policy())
        for _ in trainer.batches():
            trainer.publish()
            if enough.wait(0.02):
                return

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def test_a_producer_claims_by_credit_and_its_groups_are_trained(alone: MiniRun) -> None:
    with ratchet.join(alone.directory.root) as run, training(run):
        producer = run.producer(name="mine")
        prompts = producer.prompts(timeout_s=20)
        work = next(prompts)
        digits = (3 + int(digit) for digit in work.prompt.text[:-1])
        assert work.prompt_ids == (*digits, 13)  # of the policy's tokenizer
        spans = [VersionSpan(0, 0, 1), VersionSpan(0, 1, 2)]
        good = [work.rollout([3, 4], [-1.0, -0.5], reward=r, version=spans) for r in (0, 1)]
        assert producer.finish(work, good)
        refused = next(prompts)
        producer.fail(refused, "generation", "my engine is down")

        def of(taken: Work) -> list[GroupRow]:
            return [r for r in alone.groups() if r.group_id == taken.assignment.group_id]

        eventually(lambda: of(work)[0].state == "trained")
        eventually(lambda: of(refused)[0].state == "dropped")
    (mine,) = of(work)
    assert (mine.worker, mine.min_version, mine.num_tokens) == ("mine", 0, 4)
    assert of(refused)[0].reason == "generation"


def test_what_could_not_be_trained_is_refused_where_it_was_made(alone: MiniRun) -> None:
    with ratchet.join(alone.directory.root) as run, training(run):
        producer = run.producer(name="mine")
        work = next(producer.prompts(timeout_s=20))

        def refused(ids: list[int], logprobs: list[float], reward: float = 0.0, **more: Any) -> str:
            rollout = work.rollout(ids, logprobs, reward=reward, **({"version": 0} | more))
            with pytest.raises((ValueError, VersionError)) as caught:
                producer.finish(work, [rollout] * 2)
            return str(caught.value)

        with pytest.raises(ValueError, match="a group has 2 trajectories"):
            producer.finish(work, [])
        assert "names versions [77], which this run has never had" in refused(
            [3], [-1.0], version=77
        )
        assert "as many of each" in refused([3, 4], [-1.0])
        assert "as many of each" in refused([], [])
        assert "above 0" in refused([3], [0.5])
        assert "not finite" in refused([3], [float("nan")])
        assert "reward = nan" in refused([3], [-1.0], reward=float("nan"))
        assert "vocabulary, 0 to 13" in refused([14], [-1.0])
        assert "do not cover" in refused([3, 4], [-1.0] * 2, version=[VersionSpan(0, 0, 1)])
        one, other = (work.rollout([3], [-1.0], reward=reward, version=0) for reward in (0, 1))
        with pytest.raises(ValueError, match=r"rollout 1 .* rewards \[0.0, 1.0\]: each carries"):
            producer.finish(work, [one, [one, other]])
        assert producer.finish(work, [one, [other, other]])
    assert alone.refs["buffer"].is_alive()


def test_a_prompt_that_is_kept_too_long_is_issued_again(alone: MiniRun) -> None:
    with ratchet.join(alone.directory.root) as run, training(run):
        producer = run.producer(name="mine")
        work = next(producer.prompts(timeout_s=20))
        over = time.monotonic() + work.lease_s
        group, attempt = work.assignment.group_id, work.assignment.attempt

        def reissued() -> bool:
            return any(r.group_id == group and r.attempt > attempt for r in alone.groups())

        eventually(lambda: reissued() and time.monotonic() > over)
        late = [work.rollout([3], [-1.0], reward=r, version=0) for r in (0, 1)]
        assert not producer.finish(work, late)
        eventually(lambda: bool(alone.log.named("late_finish")))


def test_a_producer_gets_no_prompt_before_a_version_is_live(alone: MiniRun) -> None:
    with ratchet.join(alone.directory.root) as run:
        producer = run.producer()
        with pytest.raises(AskTimeout, match=r"waited 0\.2 s on buffer for a prompt"):
            next(producer.prompts(timeout_s=0.2))
        run.end("enough")
        assert list(producer.prompts(timeout_s=20)) == []


def test_a_producer_that_leaves_frees_its_prompts_at_once(alone: MiniRun) -> None:
    with ratchet.join(alone.directory.root) as run, training(run):
        with ratchet.join(alone.directory.root) as other:
            next(other.producer(name="gone").prompts(timeout_s=20))
        eventually(lambda: any(f["worker"] == "gone" for f in alone.log.named("lease_ended")))
