"""What a world is drawn with, and the lives of trainers and workers in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ratchet.actors.ref import LocalRef
from ratchet.actors.trainer import TrainerActor
from ratchet.transport.mailbox.limits import Limits

if TYPE_CHECKING:
    from tests.simulation.fakes import Output, RecordingBackend
    from tests.simulation.seen import ProcessEnd
    from tests.simulation.sessions import Host
    from tests.simulation.weight_ends import (
        SeenEngine,
        SeenReceiver,
    )

    from ratchet.actors.checkpointing import StartingPoint


@dataclass
class Delays:
    """Seconds of everything that takes time in a world."""

    step_s: float = 10.0
    token_s: float = 1.0
    move_s: float = 0.5
    load_s: float = 0.1
    message_s: float = 0.002
    tail_share: float = 0.0
    tail_s: float = 0.0


class Crash(NamedTuple):
    """What the disk holds after the end of a process."""

    name: str
    power: bool
    """the machine went down with it"""
    versions: Path
    ledger: Path


@dataclass
class Links:
    """How the processes of a world are connected."""

    limits: Limits = field(default_factory=Limits)
    drift: float = 0.0
    moves: bool = False
    launchers: Literal["one", "each"] = "one"
    """of all workers, whose end is the run's | each worker has its own"""


@dataclass
class Trouble:
    """What goes wrong at the rollouts now: shares of the calls."""

    reward: float = 0.0
    generation: float = 0.0
    hang: float = 0.0
    abort: float = 0.0


@dataclass(eq=False)
class Trainer:
    """One life of a trainer, with what it left behind."""

    name: str
    host: Host
    backend: RecordingBackend
    output: Output
    end: ProcessEnd
    ref: LocalRef
    actor: TrainerActor
    started: float
    """when"""
    killed: bool = False
    start: StartingPoint | None = None
    """the checkpoint that it goes on from"""
    parent: int = 0
    """the term that made that"""
    robbed: bool = False
    """the one before had finished a checkpoint, and there was none"""

    @property
    def incarnation(self) -> str:
        """Of its process."""
        return self.host.incarnation


@dataclass(eq=False)
class Worker:
    """One life of a rollout worker."""

    name: str
    incarnation: str
    host: Host
    engine: SeenEngine
    end: ProcessEnd
    ref: LocalRef
    receiver: SeenReceiver
    started: float
    """when"""
