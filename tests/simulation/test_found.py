"""What simulated worlds found in our own actors: one world each, so that it stays found."""

from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.config import small_config
from tests.simulation import faults as f
from tests.simulation.draw import Plan
from tests.simulation.simulate import Outcome, run
from tests.simulation.world import Delays


def live(*faults: f.Fault, delays: Delays | None = None, **sections: dict[str, Any]) -> Outcome:
    """Run an ordinary world with these faults; nothing may break."""
    config = small_config(
        rollout={"max_tokens": 2, "group_size": 2, "num_workers": 1, "group_timeout_s": 40.0}
        | sections.pop("rollout", {}),
        buffer={"batch_groups": 2, "max_staleness": 2, "lease_s": 60.0}
        | sections.pop("buffer", {}),
        trainer={"num_steps": 10, "batch_timeout_s": 2000.0} | sections.pop("trainer", {}),
        **sections,
    )
    outcome = run(Plan(1, config, delays or Delays(), 20, tuple(faults)))
    assert not outcome.problems, outcome.problems
    return outcome


@pytest.mark.parametrize("old", ["dead", "unreachable", "beside"])
@pytest.mark.parametrize("synchronous", [False, True])
def test_a_take_over_descends_from_the_base_model(old: Any, synchronous: bool) -> None:
    # the new trainer's first version was a root of its own, and the buffer died of "no common
    # ancestor" at the first token of the old one
    outcome = live(f.TakeOver(60.0, old), trainer={"synchronous": synchronous})
    assert outcome.status == "finished"
    assert [line[3] for line in outcome.trace].count("AcquireTerm") == 2


@pytest.mark.parametrize("at", [40.0, 44.0, 48.0, 52.0, 56.0, 60.0])
def test_a_take_over_during_a_publication_frees_the_room_of_the_synchronous_baseline(
    at: float,
) -> None:
    # what the old trainer had trained waited for the version of its step, which never came
    live(f.TakeOver(at, "dead"), delays=Delays(move_s=5.0), trainer={"synchronous": True})


def test_a_request_asks_for_every_burnt_ancestor_of_its_version() -> None:
    # it asked for one; with the queue full of older groups no finish came that would ask on
    lose = [f.LoseTransfer(at, ("rollout-0",)) for at in (60.1, 61.0, 62.0, 63.0)]
    live(f.TakeOver(60.0, "dead"), *lose, buffer={"max_staleness": 10})
