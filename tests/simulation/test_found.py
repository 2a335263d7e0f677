"""What simulated worlds found in our own actors: one world each, so that it stays found."""

from __future__ import annotations

from typing import Any

import pytest
from tests.simulation import faults as f
from tests.simulation.lives import Delays
from tests.simulation.ordinary import ordinary
from tests.simulation.simulate import Outcome, run
from tests.simulation.trainer_faults import TakeOver


def live(*faults: f.Fault, **extremes: Any) -> Outcome:
    """Run an ordinary world with these faults; nothing may break."""
    outcome = run(ordinary(*faults, **extremes))
    assert not outcome.problems, outcome.problems
    return outcome


@pytest.mark.parametrize("old", ["dead", "unreachable", "beside"])
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_take_over_descends_from_the_base_model(old: Any, synchronous: bool) -> None:
    # the new trainer's first version was a root of its own, and the buffer died of "no common
    # ancestor" at the first token of the old one
    outcome = live(TakeOver(60.0, old), trainer={"synchronous": synchronous})
    assert outcome.status == "finished"
    assert [line[3] for line in outcome.trace].count("AcquireTerm") == 2


@pytest.mark.parametrize("at", [40.0, 44.0, 48.0, 52.0, 56.0, 60.0])
def test_a_take_over_during_a_publication_frees_the_room_of_the_synchronous_baseline(
    at: float,
) -> None:
    # what the old trainer had trained waited for the version of its step, which never came
    live(TakeOver(at, "dead"), delays=Delays(move_s=5.0), trainer={"synchronous": True})


def test_a_request_asks_for_every_burnt_ancestor_of_its_version() -> None:
    # it asked for one; with the queue full of older groups no finish came that would ask on
    lose = [f.LoseTransfer(at, ("rollout-0",)) for at in (60.1, 61.0, 62.0, 63.0)]
    live(TakeOver(60.0, "dead"), *lose, buffer={"max_staleness": 10})
