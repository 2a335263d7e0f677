"""The product's four actors in a small world, and what each scenario lets happen there.

A `Stage` holds what outlives a process: the files of the registry and the buffer, and the record of
what was sent. Each part that is explored by itself has a stage of its own; a whole world has one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from tests.helpers.config import small_config
from tests.simulation.fakes import Output, Scorer
from tests.simulation.seen import KeptLedger, KeptVersions
from tests.simulation.small_fakes import (
    GatedBackend,
    GatedEngine,
    MailedReceiver,
    MailedSender,
)
from tests.simulation.small_life import Life
from tests.simulation.weights import Wire

from ratchet.actors.buffer import BufferActor
from ratchet.actors.ref import LocalRef
from ratchet.actors.role import BUFFER, REGISTRY, TRAINER, rollout_name
from ratchet.actors.rollout import RolloutActor
from ratchet.actors.trainer import TrainerActor
from ratchet.actors.version_registry import VersionRegistry
from ratchet.types import Prompt, RoleInfo

if TYPE_CHECKING:
    from tests.simulation.quiet_loop import QuietLoop

    from ratchet.types import RoleKind

WORKER = rollout_name(0)
NAMES = (REGISTRY, BUFFER, WORKER, TRAINER)
NUM_STEPS = 3


@dataclass(frozen=True)
class Scenario:
    """What is explored: besides all deliveries, which work may end, and who may die."""

    work: frozenset[tuple[str, str]]
    victim: str = ""
    max_staleness: int = 0
    capacity_factor: float = 1.0
    restarts: bool = True
    """its next life is part of what is explored, and not of the rest"""
    is_huge: bool = False
    """nobody has explored it to the end; only when it is asked for by name"""


_PUBLISH = frozenset({(TRAINER, "forward 0"), (TRAINER, "step 1")})
_FIRST = frozenset({(WORKER, "generation 0.1")})
_BOTH = _FIRST | {(WORKER, "generation 1.1")}

SCENARIOS = {
    "tiny": Scenario(_BOTH, capacity_factor=2.0),
    "tiny crash": Scenario(frozenset(), victim=WORKER, restarts=False),
    "small": Scenario(_PUBLISH | _FIRST),
    "publish": Scenario(_PUBLISH | _BOTH, capacity_factor=2.0),
    "stale": Scenario(_PUBLISH | _BOTH, max_staleness=1, capacity_factor=2.0),
    "crash": Scenario(_PUBLISH | _FIRST, victim=WORKER, restarts=False),
    "worker": Scenario(_FIRST | {(TRAINER, "forward 0")}, victim=WORKER),
    "worker and publish": Scenario(_PUBLISH | _FIRST, victim=WORKER, is_huge=True),
    "trainer": Scenario(_PUBLISH | _FIRST, victim=TRAINER),
}


class Parts(NamedTuple):
    """What a test looks at in a process."""

    engine: GatedEngine | None = None
    receiver: MailedReceiver | None = None
    backend: GatedBackend | None = None
    sender: MailedSender | None = None
    output: Output | None = None


class Stage:
    """Starts the lives of processes."""

    def __init__(self, scenario: Scenario) -> None:
        self.config = small_config(
            rollout={"num_workers": 1, "group_size": 1, "max_tokens": 2},
            buffer={
                "batch_groups": 1,
                "capacity_factor": scenario.capacity_factor,
                "max_staleness": scenario.max_staleness,
            },
            algorithm={"advantage": "mean"},
            trainer={"num_steps": NUM_STEPS, "batch_timeout_s": 1000.0},
            eval={"num_prompts": 0},
        )
        self.wire = Wire(load_s=0.0)

    @cached_property
    def store(self) -> KeptVersions:
        """The registry's file."""
        return KeptVersions.open(None)

    @cached_property
    def ledger(self) -> KeptLedger:
        """The buffer's file."""
        return KeptLedger.open(None)

    def begin(self, loop: QuietLoop, name: str, number: int) -> Life:
        """Start a life of a process."""
        start: Callable[[Life], LocalRef] = {
            REGISTRY: self._registry,
            BUFFER: self._buffer,
            WORKER: self._worker,
            TRAINER: self._trainer,
        }[name]
        return Life(loop, name, number, start)

    def close(self) -> None:
        """Close the files."""
        for file in ("store", "ledger"):
            if file in vars(self):
                getattr(self, file)._database.close()

    def _registry(self, life: Life) -> LocalRef:
        class Seen(VersionRegistry):
            def on_start(self) -> None:
                life.actor = self

        return Seen.start(life.system, REGISTRY, store=self.store)

    def _buffer(self, life: Life) -> LocalRef:
        class Seen(BufferActor):
            def on_start(self) -> None:
                life.actor = self
                super().on_start()

        return Seen.start(
            life.system,
            _role("buffer", life),
            config=self.config,
            prompts=[Prompt(f"p{i}", f"problem {i}") for i in range(9)],
            ledger=self.ledger,
        )

    def _worker(self, life: Life) -> LocalRef:
        engine = GatedEngine(life)
        receiver = MailedReceiver(life, self.wire, TRAINER)
        life.parts = Parts(engine=engine, receiver=receiver)
        return RolloutActor.start(
            life.system,
            _role("rollout", life),
            config=self.config,
            engine=engine,
            receiver=receiver,
            scorer=Scorer(),
            eval_prompts=[],
        )

    def _trainer(self, life: Life) -> LocalRef:
        backend, output = GatedBackend(life), Output()
        sender = MailedSender(life, self.wire, lambda: backend.weights)
        life.parts = Parts(backend=backend, sender=sender, output=output)
        return TrainerActor.start(
            life.system,
            _role("trainer", life),
            config=self.config,
            backend=backend,
            sender=sender,
            output=output,
            warm_start_prompts=[],
        )


def _role(kind: RoleKind, life: Life) -> RoleInfo:
    return RoleInfo(kind, life.name, f"{life.name}/{life.number}", f"unix:/{life.name}")
