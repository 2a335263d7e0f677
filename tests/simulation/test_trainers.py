"""Trainers that die at any moment, and come back from their checkpoints."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from tests.simulation.ordinary import ordinary
from tests.simulation.simulate import explain, run
from tests.simulation.trainer_faults import KillTrainer, TakeOver

if TYPE_CHECKING:
    from tests.simulation.faults import Fault
    from tests.simulation.plan import Plan

STEP_S = 12.0
"""About: steps, transfers and all."""


def plan(seed: int) -> Plan:
    """A world whose trainer dies a few times, or is replaced while it lives on."""
    rng = random.Random(f"trainers/{seed}")
    faults: list[Fault] = []
    for _ in range(rng.choice([1, 2, 3, 5])):
        at = round(rng.uniform(0.0, 16 * STEP_S), 3)
        kill = KillTrainer(at, rng.random() < 0.3)
        faults.append(rng.choice([kill, kill, kill, TakeOver(at, "beside")]))
    made = ordinary(
        *faults,
        trainer={"num_steps": 16},
        buffer={"max_staleness": rng.choice([1, 2, 4]), "max_reissues": 50},
        checkpoint={"every_steps": rng.choice([1, 2, 3, 5]), "keep": rng.choice([1, 2])},
        runtime={"max_restarts": 1000},
    )
    return replace(made, seed=seed, save_s=rng.choice([0.5, 8.0, 30.0]))


@pytest.mark.parametrize("seed", range(3))
def test_a_world_whose_trainers_die(seed: int) -> None:
    outcome = run(plan(seed))
    assert not outcome.problems, explain(outcome)
    assert outcome.status == "finished"


@pytest.mark.soak
def test_many_worlds_whose_trainers_die() -> None:
    for seed in range(100, 160):
        outcome = run(plan(seed))
        assert not outcome.problems, explain(outcome)
