"""A training loop of the user's own, against real links, stores and transfers."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.config import small_config
from tests.helpers.mini_run import MiniRun, Policy, eventually, step

import ratchet
from ratchet.backends.rollout.fake import fake_token
from ratchet.errors import AuthFailed, ConfigError, RunFailed
from ratchet.runtime.embed_loop import Snapshot
from ratchet.storage.versions import read_versions
from ratchet.types import RolloutGroup

pytestmark = pytest.mark.timeout(60)


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
