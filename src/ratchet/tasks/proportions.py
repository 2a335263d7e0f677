"""Whose turn it is among weighted tasks: Webster's method of apportionment (Sainte-Laguë).

Pure: consumes weights, produces an endless order of turns; waits for nothing. The turn number
`count` of a task of weight `w` is due at (2 x count + 1) / w, and turns come in the order in which
they are due. So after any number of turns each task has had its share of them, to within a few
turns, and the counts follow from the number of turns alone: a run finds its place again without
replaying them. (Balinski and Young, "Fair Representation", 1982: divisor methods are the ones
in which no task ever loses a turn because there are more of them.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

ItemT = TypeVar("ItemT")


def due(count: int, weight: float) -> float:
    """Return when a task that has had `count` turns is due again."""
    return (2 * count + 1) / weight


class Turns:
    """The order of turns, from the first one or from any later one."""

    def __init__(self, weights: Sequence[float], num_taken: int = 0) -> None:
        """Begin behind `num_taken` turns. Weights are finite and greater than 0."""
        self._weights = tuple(weights)
        self._counts = self._floor(num_taken)
        while sum(self._counts) < num_taken:
            self.next()

    @property
    def counts(self) -> tuple[int, ...]:
        """Turns that each task has had."""
        return tuple(self._counts)

    def next(self) -> int:
        """Return the task whose turn it is, and count it. Of two that are due at once, the first
        has it.
        """
        task = min(
            range(len(self._weights)), key=lambda i: (due(self._counts[i], self._weights[i]), i)
        )
        self._counts[task] += 1
        return task

    def _floor(self, num_taken: int) -> list[int]:
        # Of n turns among k tasks, a task of share s has had more than s x n - (k + 1) / 2: n turns
        # are due before a time of at least n - k / 2 shares, and a count is that time rounded. From
        # there the greedy order leads to the same counts as from the beginning.
        total = math.fsum(self._weights)
        slack = (len(self._weights) + 1) / 2 + 1  # and one for the rounding of floats
        return [max(0, math.floor(w / total * num_taken - slack)) for w in self._weights]


def interleave(parts: Sequence[Sequence[ItemT]], weights: Sequence[float]) -> tuple[ItemT, ...]:
    """Return every item once, in the order of turns; a part that runs out gives its turns away."""
    turns = sorted(
        (due(count, weight), index, count)
        for index, (part, weight) in enumerate(zip(parts, weights, strict=True))
        for count in range(len(part))
    )
    return tuple(parts[index][count] for _, index, count in turns)
