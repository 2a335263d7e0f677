"""A producer of the user's own, beside a run whose engine leaves it some prompts."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.mini_run import MiniRun, Policy, eventually

import ratchet
from ratchet.errors import AskTimeout, VersionError
from ratchet.runtime.embed import Guest
from ratchet.runtime.embed_work import Work
from ratchet.storage.groups import GroupRow
from ratchet.types import VersionSpan

pytestmark = pytest.mark.timeout(60)


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
