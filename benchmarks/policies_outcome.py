"""What came of a replay: the numbers of one row, for the benchmark of policies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from benchmarks.policies_trace import GROUP_SIZE, MOST_S, Ran, Trace, TraceEngine

from ratchet.staleness import Lineage, Position
from ratchet.types import RolloutGroup

Attempt: TypeAlias = tuple[int, int]
"""group id, attempt"""


class Outcome(NamedTuple):
    """What came of it, after the warm-up."""

    steps_per_hour: float
    trainer_idle: float
    engine_idle: float
    group_staleness: tuple[float, int, int]
    """mean, p99 and max of the groups' oldest trained tokens"""
    token_staleness: tuple[float, int, int]
    wasted: float
    """of the tokens of what ended"""
    length_bias: tuple[float, float]
    """mean and p90 of the trained tokens of a trained sample, by those of a sample offered"""
    reward_bias: float
    """mean reward trained, less that offered"""


class Trained(NamedTuple):
    """A group, as it was trained, masks included, and where."""

    group: RolloutGroup
    position: Position


class Step(NamedTuple):
    """One step of the trainer."""

    waited_s: float
    ended: float
    trained: Sequence[Trained]


class Replayed(NamedTuple):
    """All that was seen of a run."""

    trace: Trace
    lineage: Lineage
    engines: Sequence[TraceEngine]
    slots: int
    steps: Sequence[Step]
    warm_up: int
    """steps"""
    now: float

    @property
    def counted(self) -> Sequence[Step]:
        return self.steps[self.warm_up :]

    @property
    def began(self) -> float:
        return self.steps[self.warm_up - 1].ended

    @property
    def ended(self) -> float:
        return self.steps[-1].ended


def outcome(seen: Replayed, undecided: Collection[Attempt] | None) -> Outcome:
    """Return the row.

    Args:
        seen: the run.
        undecided: finished attempts that may yet be trained; None: all.
    """
    took_s = seen.ended - seen.began
    ages, token_ages = _ages(seen)
    trained = {
        (each.group.group_id, each.group.attempt): each.group
        for step in seen.steps
        for each in step.trained
    }
    whole = _whole(seen)
    open_ = whole.keys() - trained.keys()
    if undecided is not None:
        open_ &= set(undecided)
    ended = {key: samples for key, samples in whole.items() if key not in open_}
    mean, p90, reward = _bias(seen, ended, trained)
    return Outcome(
        steps_per_hour=3600 * len(seen.counted) / took_s,
        trainer_idle=sum(step.waited_s for step in seen.counted) / took_s,
        engine_idle=1 - _busy_s(seen) / (seen.slots * took_s),
        group_staleness=_summary(ages),
        token_staleness=_summary(token_ages),
        wasted=_wasted(seen, ended, trained),
        length_bias=(mean, p90),
        reward_bias=reward,
    )


def _whole(seen: Replayed) -> dict[Attempt, list[Ran]]:
    ran: dict[Attempt, list[Ran]] = {}
    for engine in seen.engines:
        for each in engine.ran:
            ran.setdefault((each.sample.group_id, each.sample.attempt), []).append(each)
    return {key: samples for key, samples in ran.items() if len(samples) == GROUP_SIZE}


def _busy_s(seen: Replayed) -> float:
    def intervals() -> Iterator[tuple[float, float]]:
        for engine in seen.engines:
            yield from ((ran.began, ran.ended) for ran in engine.ran)
            yield from ((since, seen.now) for since in engine.running.values())

    return sum(
        max(0.0, min(seen.ended, last) - max(seen.began, first)) for first, last in intervals()
    )


def _ages(seen: Replayed) -> tuple[Counter[int], Counter[int]]:
    ages: Counter[int] = Counter()
    token_ages: Counter[int] = Counter()
    for group, position in (each for step in seen.counted for each in step.trained):
        tokens: Counter[int] = Counter()
        for rollout in group.rollouts:
            for span in rollout.spans:
                num = rollout.loss_mask.data[span.start : span.end].count(1)
                tokens[seen.lineage.staleness(span.version, position)] += num
        ages[max(+tokens)] += 1
        token_ages += tokens
    return ages, token_ages


def _summary(ages: Counter[int]) -> tuple[float, int, int]:
    ages = +ages
    mean = sum(age * num for age, num in ages.items()) / ages.total()
    count, p99 = 0, 0
    for age in sorted(ages):
        if count < 0.99 * ages.total():
            p99 = age
        count += ages[age]
    return mean, p99, max(ages)


def _wasted(
    seen: Replayed,
    ended: Mapping[Attempt, Sequence[Ran]],
    trained: Mapping[Attempt, RolloutGroup],
) -> float:
    """Return the share of the tokens of what has come in and ended that no step trained."""
    made = used = 0
    for key, samples in ended.items():
        if seen.began < max(each.ended for each in samples) <= seen.ended:
            made += sum(each.sample.num_tokens for each in samples)
            if key in trained:
                used += sum(rollout.num_trained_tokens for rollout in trained[key].rollouts)
    return 1 - used / made


def _bias(
    seen: Replayed,
    ended: Mapping[Attempt, Sequence[Ran]],
    trained: Mapping[Attempt, RolloutGroup],
) -> tuple[float, float, float]:
    """Compare what was trained of the groups that began early enough to have ended with what they
    offered at first; mean and p90 of the lengths, and the mean reward.
    """
    ids = sorted(
        group_id
        for (group_id, attempt), samples in ended.items()
        if attempt == 0 and seen.began < min(s.began for s in samples) < seen.ended - MOST_S
    )
    known = set(ids)
    rollouts = [r for (i, _), group in trained.items() if i in known for r in group.rollouts]
    if not rollouts:
        return math.nan, math.nan, math.nan
    lengths = np.array([rollout.num_trained_tokens for rollout in rollouts])
    offered = seen.trace.lengths[ids, 0]
    return (
        float(lengths.mean() / offered.mean()),
        float(np.quantile(lengths, 0.9) / np.quantile(offered, 0.9)),
        float(np.mean([r.reward for r in rollouts]) - seen.trace.rewards[ids, 0].mean()),
    )
