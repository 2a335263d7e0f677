"""What those around a buffer know of themselves: workers, trainers, and what was handed out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ratchet.messages import BatchReady, StepTrained
from ratchet.types import Assignment

T = TypeVar("T")


@dataclass
class Worker:
    """What a rollout worker knows of itself."""

    name: str
    life: int = 0
    credit: int = 0
    version: int = 0

    @property
    def incarnation(self) -> str:
        return f"{self.name}/{self.life}"


@dataclass
class Trainer:
    """Where a trainer stands."""

    term: int
    version: int = 0
    step: int = 0
    done: StepTrained | None = None
    batch: BatchReady | None = None
    waits: bool = False
    """it has asked for a batch with the weights in hand, and publishes no others meanwhile"""


@dataclass(frozen=True)
class Handed:
    """A prompt that a worker was given once."""

    worker: str
    incarnation: str
    assignment: Assignment
    version: int
    """that its engine held then"""


def one_of(things: Sequence[T], which: int) -> T | None:
    return things[which % len(things)] if things else None
