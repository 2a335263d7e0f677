"""What is drawn of one world, and what may follow from its faults."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tests.simulation import faults as f
from tests.simulation.lives import Delays, Links
from tests.simulation.standby import STANDBY
from tests.simulation.trainer_faults import LoseNode

from ratchet.actors.role import BUFFER, REGISTRY, TRAINER
from ratchet.config import Config


@dataclass(frozen=True)
class Plan:
    """Everything that decides what happens in one world."""

    seed: int
    config: Config
    delays: Delays
    num_prompts: int
    faults: tuple[f.Fault, ...]
    links: Links = field(default_factory=Links)
    save_s: float | None = None
    """seconds that a checkpoint takes; None if there are none, and a dead trainer stays dead"""
    payload_s: float | None = None
    """seconds that the payload of a finished group takes to be written; None if none is kept"""
    has_standby: bool = False
    """a trainer that is gone for good is replaced"""

    @property
    def fatal(self) -> tuple[f.Fault, ...]:
        """Faults that end a run: what it cannot do without dies, or is given up by the others."""
        silent_s: Counter[str] = Counter()
        for fault in self.faults:
            if isinstance(fault, f.Freeze | f.Silence):
                silent_s[fault.name] += fault.for_s
        given_up = {
            name
            for name, seconds in silent_s.items()
            if not name.startswith("rollout") and seconds > self.links.limits.dead_s / 2
            if not (self.has_standby and name in {TRAINER, STANDBY})
        }
        fatal = tuple(
            fault
            for fault in self.faults
            if isinstance(fault, f.Crash | f.BadDisk)
            or (isinstance(fault, f.Freeze | f.Silence) and fault.name in given_up)
        )
        return fatal + self._beyond_the_standby

    @property
    def _beyond_the_standby(self) -> tuple[f.Fault, ...]:
        """What keeps the trainer away that has taken over already: there is one standby."""
        if not self.has_standby:
            return ()
        gone = [
            fault
            for fault in self.faults
            if isinstance(fault, LoseNode)
            or (
                isinstance(fault, f.Freeze | f.Silence)
                and fault.name == TRAINER
                and fault.for_s > self.links.limits.dead_s / 2
            )
        ]
        return tuple(fault for fault in gone[1:] if not isinstance(fault, LoseNode))

    @property
    def unheard_s(self) -> float:
        """For how long the buffer may hear nothing of the registry, in all."""
        away_s = sum(fault.down_s + 1 for fault in self.faults if isinstance(fault, f.Revive))
        return away_s + sum(
            fault.for_s
            for fault in self.faults
            if isinstance(fault, f.Freeze | f.Silence | f.SlowReader)
            and fault.name in {REGISTRY, BUFFER}
        )

    @property
    def on_disk(self) -> bool:
        """The files are real ones."""
        struck = any(isinstance(fault, f.Crash | f.Revive) for fault in self.faults)
        return struck or self.payload_s is not None

    @property
    def delays_bytes(self) -> bool:
        """What was written may be read much later."""
        return any(isinstance(fault, f.Silence | f.SlowReader) for fault in self.faults)

    @property
    def blinds(self) -> bool:
        """Somebody may not hear of an end in time."""
        return any(isinstance(fault, f.Freeze | f.Silence | f.SlowReader) for fault in self.faults)

    @property
    def may_fail(self) -> tuple[str, ...]:
        """Texts of failures that this world may rightly end in."""
        texts = []
        bad = sum(fault.num_steps for fault in self.faults if isinstance(fault, f.NonFinite))
        if bad >= self.config.trainer.max_bad_steps:
            texts.append("steps in a row were not finite")
        if self.config.buffer.batch_filter is not None:
            texts += ["steps in a row had no token to train", *(["were not finite"] if bad else [])]
        least = self.config.buffer.min_tokens
        if least is not None and least > self.config.rollout.max_tokens:
            texts.append("waited 50.0 s")
        return tuple(texts)
