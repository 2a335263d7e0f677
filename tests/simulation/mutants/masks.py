"""Faults of what a step trains of its batch: masks that are not made, or not heeded."""

from __future__ import annotations

from typing import Any

from tests.simulation.mutants.base import Patches, mutant

from ratchet.actors import optimisation
from ratchet.staleness import Lineage


@mutant("tokens past the bound are trained with the rest of their group", seed=54)
def stale_tokens_trained() -> Patches:
    mask_stale = Lineage.mask_stale

    def keep(self: Any, group: Any, position: Any, max_staleness: int) -> Any:
        left = mask_stale(self, group, position, max_staleness)
        return left and group

    return [(Lineage, "mask_stale", keep)]


@mutant("samples that the batch filter has marked are trained", seed=9)
def marks_ignored() -> Patches:
    return [(optimisation, "mark", lambda judged, marks: judged)]
