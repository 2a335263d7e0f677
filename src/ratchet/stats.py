"""What the buffer says of itself with each batch, and the distributions in it.

Consumes values, produces counts, means, spreads and quantiles; waits for nothing. A `Distribution`
is as large as the numbers of two significant digits that occur in it (at most 3,241, in practice
some tens), however many values it has seen, and two of them can be put together. Count, mean,
standard deviation, minimum and maximum are exact. A quantile is rounded to two significant digits:
within 5% of the value, and exact for whole numbers below 100.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import msgspec

from ratchet.types import RolloutStats

_SMALLEST: Final = 1e-6
_LARGEST: Final = 1e12
_MOST_PENDING: Final = 512
_QUANTILES: Final = {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}


@lru_cache(maxsize=8192)
def rounded(value: float) -> float:
    """Return the value with two significant digits; 0 below 1e-6, and never beyond 1e12.

    >>> rounded(1234), rounded(-0.126), rounded(99)
    (1200.0, -0.13, 99.0)
    """
    if abs(value) < _SMALLEST:
        return 0.0
    return float(f"{min(max(value, -_LARGEST), _LARGEST):.1e}")


class Distribution(msgspec.Struct, frozen=True, array_like=True):
    """Numbers, put together. Those of nothing are 0; its `summary` has null in their place."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """sum of the squared differences from the mean"""
    low: float = 0.0
    high: float = 0.0
    histogram: dict[float, int] = {}
    """how many values round to each number of two significant digits"""

    @property
    def std(self) -> float:
        """The standard deviation of the population."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0

    def quantile(self, share: float) -> float:
        """Return the smallest number, of two digits, that this share of the values do not exceed.

        Raises:
            ValueError: if there are no values.
        """
        if not self.count:
            msg = "nothing has no quantiles"
            raise ValueError(msg)
        left = max(1, math.ceil(share * self.count - 1e-9))
        for value in sorted(self.histogram):
            left -= self.histogram[value]
            if left <= 0:
                return min(max(value, self.low), self.high)
        return self.high

    def summary(self) -> dict[str, Any]:
        """Return it as it stands in a line of metrics."""
        found: dict[str, Any] = {"count": self.count}
        found |= dict.fromkeys(("mean", "std", "min", *_QUANTILES, "max"))
        if self.count:
            found |= {"mean": self.mean, "std": self.std, "min": self.low, "max": self.high}
            found |= {name: self.quantile(share) for name, share in _QUANTILES.items()}
        found["histogram"] = {f"{value:g}": n for value, n in sorted(self.histogram.items())}
        return found

    @classmethod
    def of_summary(cls, found: Mapping[str, Any]) -> Distribution:
        """Return what a summary was made of."""
        if not found["count"]:
            return cls()
        return cls(
            found["count"],
            found["mean"],
            found["std"] ** 2 * found["count"],
            found["min"],
            found["max"],
            {float(value): n for value, n in found["histogram"].items()},
        )


NOTHING: Final = Distribution()


@dataclass(slots=True)
class Tally:
    """A distribution that grows. Values wait in a list of bounded length and are computed together:
    each group that passes adds a few, and that must cost next to nothing.
    """

    _count: int = 0
    _mean: float = 0.0
    _squares: float = 0.0
    _low: float = math.inf
    _high: float = -math.inf
    _histogram: dict[float, int] = field(default_factory=dict)
    _pending: list[float] = field(default_factory=list)

    def add(self, values: Sequence[float]) -> None:
        """Count values."""
        self._pending.extend(values)
        if len(self._pending) >= _MOST_PENDING:
            self._settle()

    def count(self, value: float, times: int = 1) -> None:
        """Count one value several times."""
        if times:
            self.merge(Distribution(times, value, 0.0, value, value, {rounded(value): times}))

    def merge(self, other: Distribution) -> None:
        """Count the values of another one."""
        if not other.count:
            return
        total = self._count + other.count
        apart = other.mean - self._mean
        self._squares += other.squares + apart * apart * (self._count * other.count / total)
        self._mean += apart * (other.count / total)
        self._count = total
        self._low = min(self._low, other.low)
        self._high = max(self._high, other.high)
        for value, times in other.histogram.items():
            self._histogram[value] = self._histogram.get(value, 0) + times

    def read(self) -> Distribution:
        """Return it as it is now."""
        if not self._count:  # all values wait still
            return _measured(self._pending)
        self._settle()
        numbers = (self._count, self._mean, self._squares, self._low, self._high)
        return Distribution(*numbers, dict(self._histogram))

    def _settle(self) -> None:
        values, self._pending = self._pending, []
        self.merge(_measured(values))


def _measured(values: Sequence[float]) -> Distribution:
    """Return the distribution of these values."""
    if not values:
        return NOTHING
    mean = sum(values) / len(values)
    apart = math.dist(values, (mean,) * len(values))
    histogram: dict[float, int] = {}
    for value in values:
        digits = rounded(value)
        histogram[digits] = histogram.get(digits, 0) + 1
    return Distribution(len(values), mean, apart * apart, min(values), max(values), histogram)


def merged(distributions: Iterable[Distribution]) -> Distribution:
    """Return the distribution of all their values."""
    tally = Tally()
    for each in distributions:
        tally.merge(each)
    return tally.read()


class Population(msgspec.Struct, frozen=True):
    """The finished groups that have come to one place."""

    groups: int = 0
    tokens: Distribution = NOTHING
    """completion tokens of each rollout"""
    rewards: Distribution = NOTHING
    """of each trajectory that came to its end"""
    task_rewards: dict[str, Distribution] = {}
    """the same, by the label of the task, where there are several"""


NOBODY: Final = Population()


class BufferStats(msgspec.Struct, frozen=True, kw_only=True):
    """The buffer at the moment it hands out a batch. Window counters count since the previous
    batch.
    """

    queue_groups: int = 0
    """Finished groups that stay behind, after this batch was taken."""
    queue_bytes: int = 0
    """Bytes of their arrays."""
    queue_staleness: Distribution = NOTHING
    """Of each of them, in optimiser steps, for the weights that take this batch."""
    in_flight_groups: int = 0
    """Groups issued and not yet finished."""
    staleness: tuple[int, ...] = ()
    """Staleness of each group of the batch, in optimiser steps."""
    rejected_staleness: Distribution = NOTHING
    """Window: of each group that was dropped or issued again for its staleness."""
    offered: Population = Population()
    """Window: groups that finished, whatever became of them."""
    trained: Population = Population()
    """Window: groups that a step was told to have trained."""
    lost: Population = Population()
    """Window: finished groups that were dropped, or whose prompt was issued again."""
    requeued_groups: int = 0
    """Window: lost groups that came back from their payloads."""
    dropped: dict[str, int] = {}
    """Window: groups dropped, by reason."""
    retried: dict[str, int] = {}
    """Window: groups that the unused handler issued again, by reason."""
    reissued: dict[str, int] = {}
    """Window: groups issued again because a process died or stalled, by reason."""
    masked: dict[str, int] = {}
    """Window: groups handed out, to be trained in part, by reason; this batch included."""
    claim_to_finish_s: Distribution = NOTHING
    """Window: seconds from the claim of a group to its finish, of the offered ones."""
    finish_to_train_s: Distribution = NOTHING
    """Window: seconds from its finish until its step was reported, of the trained ones."""
    workers: tuple[RolloutStats, ...] = ()
    custom: dict[str, float] = {}
    """What the user's own policy says of itself, by the name of its metric."""
