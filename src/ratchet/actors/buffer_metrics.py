"""The buffer's part of one line of metrics: what it counted, and how stale a step's tokens are.

Pure: consumes the buffer's statistics, the groups that a step trains and the staleness of their
versions; produces one flat dictionary; waits for nothing. Definitions: docs/metrics.md.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ratchet.stats import BufferStats, Population, Tally
from ratchet.types import PolicyVersion, Rollout, RolloutGroup

_FILTER: Final = "filter:"
_NO_FAILURE: Final = frozenset(
    {
        "aborted",
        "stale",
        "non_finite",
        "no_tokens",
        "lease_expired",
        "worker_died",
        "trainer_died",
    }
)
"""Reasons of groups that were generated and scored, or that nobody may be blamed for; all others,
but for the filters', are of generation and reward."""


def buffer_metrics(stats: BufferStats) -> dict[str, Any]:
    """Return what the buffer has counted."""
    unused = Counter(stats.dropped) + Counter(stats.retried)
    filtered = {why.removeprefix(_FILTER): n for why, n in unused.items() if _is_filter(why)}
    failed = {why: n for why, n in unused.items() if not _is_filter(why) and why not in _NO_FAILURE}
    return {
        "buffer/queue_groups": stats.queue_groups,
        "buffer/queue_bytes": stats.queue_bytes,
        "buffer/queue_staleness": stats.queue_staleness.summary(),
        "buffer/in_flight_groups": stats.in_flight_groups,
        "buffer/rejected_staleness": stats.rejected_staleness.summary(),
        "buffer/aborted_groups": unused["aborted"],
        "buffer/stale_groups": unused["stale"],
        "buffer/failed": failed,
        "buffer/filtered": filtered,
        "buffer/dropped": stats.dropped,
        "buffer/retried": stats.retried,
        "buffer/reissued": stats.reissued,
        "buffer/masked": stats.masked,
        "buffer/requeued_groups": stats.requeued_groups,
        "buffer/claim_to_finish_s": stats.claim_to_finish_s.summary(),
        "buffer/finish_to_train_s": stats.finish_to_train_s.summary(),
        **_population("offered", stats.offered),
        **_population("trained", stats.trained),
        **_population("lost", stats.lost),
        **stats.custom,
    }


def consumed_staleness(
    groups: Sequence[RolloutGroup], ages: Mapping[PolicyVersion, int]
) -> dict[str, Any]:
    """Return how stale what a step trains is.

    Args:
        groups: of which a token is trained.
        ages: staleness of each of their versions, in optimiser steps.
    """
    staleness, tokens, spread = Tally(), Tally(), Tally()
    histogram: Counter[int] = Counter()
    two_versions = 0
    for group in groups:
        oldest = 0
        for rollout in itertools.chain.from_iterable(group.trained_trajectories):
            two_versions += rollout.min_version != rollout.max_version
            trained = _trained_tokens(rollout, ages)
            for age, number in trained.items():
                tokens.count(age, number)
            if trained:
                oldest = max(oldest, *trained)
                spread.count(max(trained) - min(trained))
        staleness.count(oldest)
        histogram[oldest] += 1
    groupwise, rolloutwise = staleness.read().summary(), spread.read().summary()
    return {
        "buffer/staleness_mean": groupwise["mean"],
        "buffer/staleness_max": groupwise["max"],
        "buffer/staleness_histogram": {str(age): n for age, n in sorted(histogram.items())},
        "buffer/token_staleness": tokens.read().summary(),
        "buffer/version_spread_mean": rolloutwise["mean"],
        "buffer/version_spread_max": rolloutwise["max"],
        "buffer/two_version_rollouts": two_versions,
    }


def _trained_tokens(rollout: Rollout, ages: Mapping[PolicyVersion, int]) -> Counter[int]:
    """Return how many trained tokens have each staleness."""
    found: Counter[int] = Counter()
    for span in rollout.spans:
        number = rollout.loss_mask.count_ones(span.start, span.end)
        if number:
            found[ages[span.version]] += number
    return found


def _population(name: str, population: Population) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"buffer/{name}/groups": population.groups,
        f"buffer/{name}/tokens": population.tokens.summary(),
        f"buffer/{name}/reward": population.rewards.summary(),
    }
    if population.task_rewards:
        tasks = {label: each.summary() for label, each in population.task_rewards.items()}
        found[f"buffer/{name}/task_reward"] = tasks
    return found


def _is_filter(reason: str) -> bool:
    return reason.startswith(_FILTER)
