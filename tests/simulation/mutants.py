"""Faults of others, put back into our actors one at a time: each must be caught by some world."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

MUTANTS: dict = {}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    yield
