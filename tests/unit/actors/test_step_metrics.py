from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.helpers.training import make_groups

from ratchet.actors.judgement import Judgement
from ratchet.actors.step_metrics import StepMetrics, StepResult, StepTimes
from ratchet.stats import BufferStats
from ratchet.types import Packed, RolloutGroup, RolloutStats, VersionSpan


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


AGES = {0: 2, 1: 1, 2: 0}
"""staleness of each version"""


def stats(*workers: RolloutStats) -> BufferStats:
    return BufferStats(
        queue_groups=3,
        in_flight_groups=5,
        staleness=(9, 9, 9),
        dropped={"stale": 1},
        retried={"aborted": 4},
        reissued={"worker_died": 6},
        workers=workers,
    )


def worker(name: str = "r0", incarnation: str = "a", **totals: Any) -> RolloutStats:
    return RolloutStats(name, incarnation, **totals)


def result(*groups: RolloutGroup, **changes: Any) -> StepResult:
    judged = Judgement(groups or tuple(make_groups(3, 2)), {})
    return StepResult(0, judged, AGES, applied=True, reports={"loss": 0.5})._replace(**changes)


def line(
    metrics: StepMetrics,
    times: StepTimes,
    found: StepResult | None = None,
    stats: BufferStats = stats(),  # noqa: B008
    step: int = 1,
) -> dict[str, Any]:
    return metrics.line(step, found or result(), stats=stats, times=times)


def test_each_part_of_a_step_is_charged_once() -> None:
    clock = Clock()
    times = StepTimes(clock)
    for part, seconds in (("wait_s", 1.0), ("train_s", 2.0), ("publish_s", 4.0), ("train_s", 8.0)):
        clock.time += seconds
        times.mark(part)
    clock.time += 16.0
    assert times.parts == {"wait_s": 1.0, "train_s": 10.0, "publish_s": 4.0}
    assert times.total == 15.0


def test_a_line_has_what_the_step_and_the_buffer_saw() -> None:
    clock = Clock()
    metrics = StepMetrics(clock)
    metrics.start()
    times = StepTimes(clock)
    clock.time += 3.0
    times.mark("wait_s")
    clock.time += 1.0
    times.mark("train_s")
    metrics.synced(7.0, {"weights/version": 3})
    metrics.caught_up()
    groups = make_groups(3, 2)
    two = msgspec.structs.replace(
        groups[0].rollouts[0], spans=(VersionSpan(0, 0, 1), VersionSpan(1, 1, 2))
    )
    rollouts = (two, groups[0].rollouts[1])
    groups[0] = msgspec.structs.replace(groups[0], rollouts=rollouts)
    groups[1] = made_by(groups[1], 2)
    found = line(metrics, times, result(*groups, version=8, applied=False), step=9)
    rewards = [reward for group in groups for reward in group.rewards]
    assert (found["step"], found["version"], found["applied"]) == (9, 8, False)
    assert found["time_s"] == 4.0
    assert found["reward_mean"] == pytest.approx(sum(rewards) / 6)
    assert found["buffer/staleness_mean"] == pytest.approx(4 / 3)
    assert found["buffer/staleness_max"] == 2
    assert found["buffer/staleness_histogram"] == {"0": 1, "2": 2}
    assert found["buffer/two_version_rollouts"] == 1
    assert found["num_groups"] == 3
    assert found["num_tokens"] == sum(group.num_tokens for group in groups)
    assert found["buffer/masked_tokens"] == found["buffer/marked_samples"] == 0
    assert (found["buffer/queue_groups"], found["buffer/in_flight_groups"]) == (3, 5)
    assert found["buffer/dropped"] == {"stale": 1}
    assert found["buffer/retried"] == {"aborted": 4}
    assert found["buffer/reissued"] == {"worker_died": 6}
    assert (found["wait_s"], found["train_s"], found["publish_s"]) == (3.0, 1.0, 0.0)
    assert (found["step_s"], found["trainer_busy_share"]) == (4.0, 0.25)
    assert (found["sync_s"], found["loss"]) == (7.0, 0.5)


def test_workers_are_read_by_difference_and_a_new_life_from_nothing() -> None:
    clock = Clock()
    metrics = StepMetrics(clock)
    metrics.start()
    times = StepTimes(clock)

    def rollouts(*workers: RolloutStats) -> tuple[float, float]:
        nonlocal found
        found = line(metrics, times, stats=stats(*workers))
        return found["rollout_busy_share"], found["tokens_per_s"]

    found: dict[str, Any] = {}
    clock.time += 10
    first = worker(uptime_s=20.0, busy_s=5.0, generated_tokens=100, starved_s=8.0)
    assert rollouts(first) == (0.25, 10.0)
    assert (found["buffer/worker_wait_s"], found["buffer/worker_wait_share"]) == (8.0, 0.4)
    clock.time += 5
    second = worker(uptime_s=25.0, busy_s=10.0, generated_tokens=200, starved_s=9.0)
    other = worker("r1", uptime_s=10.0, busy_s=5.0, generated_tokens=50, starved_s=4.0)
    assert rollouts(second, other) == (0.75, 30.0)  # shares 1.0 and 0.5
    assert found["buffer/worker_wait_s"] == 1.0 + 4.0
    assert found["buffer/worker_wait_share"] == pytest.approx((0.2 + 0.4) / 2)
    clock.time += 5
    reborn = worker(incarnation="b", uptime_s=2.0, busy_s=1.0, generated_tokens=10)
    assert rollouts(reborn, other) == (0.5, 2.0)  # r1 has not spoken since


def test_nobody_and_no_time_are_zero_not_an_error() -> None:
    clock = Clock()
    metrics = StepMetrics(clock)
    metrics.start()
    found = line(metrics, StepTimes(clock), stats=stats())
    assert (found["rollout_busy_share"], found["tokens_per_s"]) == (0.0, 0.0)
    assert found["trainer_busy_share"] == 0.0


def made_by(group: RolloutGroup, version: int) -> RolloutGroup:
    rollouts = tuple(
        msgspec.structs.replace(r, spans=(VersionSpan(version, 0, len(r.completion_ids)),))
        for r in group.rollouts
    )
    return msgspec.structs.replace(group, rollouts=rollouts)


def untrained(group: RolloutGroup, *indices: int) -> RolloutGroup:
    rollouts = tuple(
        msgspec.structs.replace(each, loss_mask=Packed("uint8", bytes(len(each.loss_mask))))
        if index in indices
        else each
        for index, each in enumerate(group.rollouts)
    )
    return msgspec.structs.replace(group, rollouts=rollouts)


def test_what_is_masked_is_in_no_mean_and_no_count_but_its_own() -> None:
    clock = Clock()
    first, second, third = make_groups(3, 2)
    third = made_by(third, 2)
    judged = Judgement(
        (untrained(first, 0), untrained(second, 0, 1), third),
        {second.group_id: "filter:batch", 77: "stale"},
        masked_groups=2,
        masked_tokens=5,
        marked_samples=3,
    )
    found = line(StepMetrics(clock), StepTimes(clock), result(judged=judged, reports={}))
    left = [first.rollouts[1], *third.rollouts]
    assert found["reward_mean"] == pytest.approx(sum(each.reward for each in left) / 3)
    assert found["num_groups"] == 2
    assert found["num_tokens"] == sum(len(each.completion_ids) for each in left)
    assert found["buffer/staleness_histogram"] == {"0": 1, "2": 1}
    assert found["buffer/masked_groups"] == 2
    assert found["buffer/masked_tokens"] == 5
    assert found["buffer/marked_samples"] == 3


def test_a_batch_with_nothing_to_train_has_a_line_too() -> None:
    clock = Clock()
    (group,) = make_groups(1, 2)
    judged = Judgement(
        (untrained(group, 0, 1),), {group.group_id: "filter:batch"}, marked_samples=2
    )
    nothing = result(judged=judged, applied=False, reports={})
    found = line(StepMetrics(clock), StepTimes(clock), nothing)
    assert (found["applied"], found["num_groups"], found["num_tokens"]) == (False, 0, 0)
    assert found["reward_mean"] is found["reward_std"] is None
    assert found["buffer/staleness_mean"] is found["buffer/staleness_max"] is None
    assert found["buffer/marked_samples"] == 2


def test_a_step_that_is_not_applied_has_trained_nothing() -> None:
    first, second = make_groups(2, 2)
    judged = Judgement((first, second), {second.group_id: "filter:batch", 77: "stale"})
    taken = result(judged=judged)
    assert taken.trained == (first.group_id,)
    assert taken.rejected == judged.rejected
    skipped = taken._replace(applied=False)
    assert skipped.trained == ()
    assert skipped.rejected == {**judged.rejected, first.group_id: "non_finite"}
