"""Faults of checkpoints, and of who goes on from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.simulation.mutants.base import Patches, mutant
from tests.simulation.ordinary import ordinary
from tests.simulation.trainer_faults import KillTrainer, TakeOver

from ratchet.actors.recovery import Recovery
from ratchet.storage import checkpoints
from ratchet.storage.checkpoints import Checkpoints
from ratchet.types import PolicyVersion

_begin = Checkpoints.begin
_REPLACED = replace(
    ordinary(TakeOver(50.0, "beside"), KillTrainer(72.0), checkpoint={"every_steps": 1, "keep": 2}),
    save_s=19.0,
)
"""The old trainer finishes a checkpoint while its successor takes its first steps, and dies."""


@mutant("a trainer that was replaced leaves a checkpoint, and it is gone on from", world=_REPLACED)
def zombies_checkpoint_taken() -> Patches:
    return [
        (Checkpoints, "_check", lambda self, facts: None),
        (checkpoints, "goes_on", lambda term, version, starts: True),
    ]


_KILLED = replace(
    ordinary(KillTrainer(75.0), checkpoint={"every_steps": 2, "keep": 2}), save_s=20.0
)
"""It dies while it writes its second checkpoint."""


@mutant("a checkpoint has its name before it is whole", world=_KILLED, slow=True)
def written_in_place() -> Patches:
    return [(Checkpoints, "_unfinished", Checkpoints._path)]


def _begin_with_none(self: Checkpoints, version: PolicyVersion) -> Path:
    for old in self.there():
        self._remove(old.path)
    return _begin(self, version)


@mutant("the old checkpoint is deleted before the new one is complete", world=_KILLED, slow=True)
def deleted_before_complete() -> Patches:
    return [(Checkpoints, "begin", _begin_with_none)]


@mutant("what is trained past the checkpoint is not given back", world=_KILLED, slow=True)
def lost_steps_kept() -> Patches:
    return [(Recovery, "settle", lambda self, request: None)]
