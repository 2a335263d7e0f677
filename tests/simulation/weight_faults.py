"""What can go wrong in a transfer of weights, and how it is drawn.

A fault strikes where it hurts: when an engine asks for a certain part of its next transfer, so that
it falls between two buckets, or after the last one and before the trailer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tests.simulation import faults as f
from tests.simulation.fabric import Failure
from tests.simulation.trainer_faults import TakeOver
from tests.simulation.weight_ends import NUM_PARTS, PART_MIB

from ratchet.actors.role import TRAINER

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(frozen=True, kw_only=True)
class _InTransfer(f.Fault):
    engine: str
    part: int

    def strike(self, world: World) -> None:
        happens = super().strike
        world.wire.moments.append((self.engine, self.part, lambda: happens(world)))


@dataclass(frozen=True, kw_only=True)
class KillInTransfer(_InTransfer, f.Kill):
    """Workers die when one of them asks for a part of the weights."""


@dataclass(frozen=True, kw_only=True)
class FreezeInTransfer(_InTransfer, f.Freeze):
    """A process stands still when an engine asks for a part of the weights."""


@dataclass(frozen=True, kw_only=True)
class TakeOverInTransfer(_InTransfer, TakeOver):
    """Another trainer starts when an engine asks for a part of the weights."""


@dataclass(frozen=True)
class BreakTransfer(f.Fault):
    """The connections of an engine's next transfer break before a part; it comes back."""

    name: str
    part: int

    def strike(self, world: World) -> None:
        world.wire.breaks[self.name] = self.part


@dataclass(frozen=True)
class FailingEngine(f.Fault):
    """The next call of an engine in a load fails, or does nothing."""

    name: str
    call: Literal["pause", "write", "read", "stamp", "forget"]
    known: bool
    """the engine says what it is; else its process ends of it"""

    def strike(self, world: World) -> None:
        world.wire.failures[self.name] = Failure(self.call, self.known)


def draw_config(seed: int) -> dict[str, Any]:
    """How weights travel in a world; drawn apart, so that the rest of it stays as it was."""
    rng = random.Random(f"weights/{seed}")
    return {
        "transport": rng.choice(["broadcast", "broadcast", "p2p"]),
        "bucket_mib": rng.choice([1, 1, 2, NUM_PARTS]) * PART_MIB,
        "verify": rng.random() < 0.7,
        "staging_mib": rng.choice([PART_MIB, 1.0]),
    }


def draw_faults(
    seed: int, names: list[str], horizon: float, timeout_s: float, verify: bool
) -> list[f.Fault]:
    """What goes wrong in transfers, in every other world; drawn apart as well."""
    rng = random.Random(f"transfers/{seed}")
    count = rng.choice([0, 0, 1, 2, 4])
    return [_fault(rng, names, horizon, timeout_s, verify=verify) for _ in range(count)]


def _fault(
    rng: random.Random, names: list[str], horizon: float, timeout_s: float, *, verify: bool
) -> f.Fault:
    at = round(rng.choice([0.0, rng.uniform(0, horizon)]), 3)
    engine, part = rng.choice(names), rng.randrange(NUM_PARTS + 1)
    some = tuple(name for name in names if rng.random() < 0.3 or name == engine)
    calls: list[Any] = ["pause", "write", "write", "stamp"] + ["read", "forget"] * verify
    makers: list[Callable[[], f.Fault]] = [
        lambda: KillInTransfer(at, some, 0.0, engine=engine, part=part),
        lambda: KillInTransfer(at, (engine,), 0.0, engine=engine, part=part),
        lambda: FreezeInTransfer(
            at,
            engine,
            timeout_s * rng.choice([0.1, 0.3, 1.2]),
            engine=rng.choice(names),
            part=part,
        ),
        lambda: FreezeInTransfer(at, TRAINER, 1.0, engine=engine, part=part),
        lambda: TakeOverInTransfer(
            at, rng.choice(["dead", "unreachable", "beside"]), engine=engine, part=part
        ),
        lambda: BreakTransfer(at, engine, part),
        lambda: BreakTransfer(at, engine, part),
        lambda: FailingEngine(at, engine, rng.choice(calls), known=rng.random() < 0.7),
        lambda: FailingEngine(at, engine, rng.choice(calls), known=rng.random() < 0.7),
    ]
    return rng.choice(makers)()
