"""Faults of others, put back into our actors one at a time: some world must catch each.

A mutant is a small patch of one method and the line of the list of faults that it stands for;
`seed` is a world that catches it, found by trying worlds from 0 on. Where the line is about a part
that the simulation replaces by a fake (an engine, a receiver), the fake is patched, which proves
that the invariant can fail, not that the real part is right: those are marked `fake`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

Patches = list[tuple[type, str, Any]]


@dataclass(frozen=True)
class Mutant:
    """One fault put back."""

    line: str
    """the line of the list that it stands for"""
    patches: Callable[[], Patches]
    seed: int | None
    """of a world that catches it; None if none is known"""
    fake: bool = False
    slow: bool = False
    """its world takes seconds"""


MUTANTS: dict[str, Mutant] = {}


def mutant(
    line: str, *, seed: int | None, fake: bool = False, slow: bool = False
) -> Callable[[Any], Any]:
    """Register a function that returns the patches."""

    def register(make: Callable[[], Patches]) -> Callable[[], Patches]:
        MUTANTS[make.__name__] = Mutant(line, make, seed, fake, slow)
        return make

    return register


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Put a fault back, for as long as the block lasts."""
    with ExitStack() as stack:
        for owner, attribute, value in MUTANTS[name].patches() if name else []:
            stack.enter_context(patch.object(owner, attribute, value))
        yield
