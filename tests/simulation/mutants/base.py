"""Faults of others, put back into our actors one at a time: some world must catch each.

A mutant is a small patch of one method and the line of the list of faults that it stands for. What
catches it is a random world, whose `seed` was found by trying worlds from 0 on, or, where none of
those comes to its moment, a handmade `world`. Where the line is about a part that the simulation
replaces by a fake (an engine, a receiver), the fake is patched, which proves that the invariant can
fail, not that the real part is right: those are marked `fake`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from tests.simulation.draw import draw

if TYPE_CHECKING:
    from tests.simulation.plan import Plan

Patches = list[tuple[object, str, Any]]
"""(class or module, attribute, what takes its place)"""


@dataclass(frozen=True)
class Mutant:
    """One fault put back."""

    line: str
    """the line of the list that it stands for"""
    patches: Callable[[], Patches]
    seed: int | None
    """of a random world that catches it; None if none is known, or if its world is handmade"""
    world: Plan | None = None
    """a handmade one that catches it"""
    fake: bool = False
    slow: bool = False
    """its world takes seconds"""

    def worlds(self) -> Iterator[Plan]:
        """Yield the world that is known to catch it, then others that may.

        Those are the handmade one with other random delays, or all random worlds.
        """
        if self.world is not None:
            for seed in itertools.count(self.world.seed):
                yield replace(self.world, seed=seed)
        for seed in itertools.chain([] if self.seed is None else [self.seed], itertools.count()):
            yield draw(seed)


MUTANTS: dict[str, Mutant] = {}


def mutant(
    line: str,
    *,
    seed: int | None = None,
    world: Plan | None = None,
    fake: bool = False,
    slow: bool = False,
) -> Callable[[Any], Any]:
    """Register a function that returns the patches."""

    def register(make: Callable[[], Patches]) -> Callable[[], Patches]:
        MUTANTS[make.__name__] = Mutant(line, make, seed, world, fake, slow)
        return make

    return register


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Put a fault back, for as long as the block lasts."""
    with ExitStack() as stack:
        for owner, attribute, value in MUTANTS[name].patches() if name else []:
            stack.enter_context(patch.object(owner, attribute, value))
        yield
