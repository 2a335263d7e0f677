"""At the end a group is in one place, went a way that there is, was trained at most once (I3).

Consumes the ledger, the buffer and what the models were trained on; produces what is wrong.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation import trainers
from tests.simulation.records import STEP_LOST, is_a_life, life_of

if TYPE_CHECKING:
    from tests.simulation.plan import Plan
    from tests.simulation.world import World


class ConservationChecks:
    """Of one world."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        expect: Callable[[bool, str, str], None],
        *,
        num_lives: int,
        another_trains: bool,
    ) -> None:
        """Look at a world that has ended.

        Args:
            plan: of the world.
            world: itself.
            expect: told of each invariant.
            num_lives: of the buffer.
            another_trains: one trainer may have gone on from elsewhere than another was.
        """
        self._plan = plan
        self._world = world
        self._expect = expect
        self._num_lives = num_lives
        self._another_trains = another_trains

    def check(self) -> None:
        """Check all of it."""
        ledger = self._world.ledger
        rows = ledger.groups()
        keys = Counter((row.prompt_id, row.epoch) for row in rows)
        twice = [key for key, count in keys.items() if count > 1]
        self._expect(not twice, "I3", f"issued twice in an epoch: {twice}")
        for row in rows:
            events = life_of(ledger.events(row.group_id))
            trained = events.count("trained") - events.count(STEP_LOST)
            self._expect(trained <= 1, "I3", f"{row.group_id}: {events}")
            self._expect(is_a_life(events), "I3", f"group {row.group_id} went {events}")
        budget = self._plan.config.buffer
        retries = 0 if budget.unused in {"drop", "mask"} else budget.max_retries
        taken_over = self._another_trains
        for row in rows:
            details = [event.detail for event in ledger.events(row.group_id)]
            lost, deaths = details.count(STEP_LOST), details.count("buffer_died")
            again = (row.retries, row.attempt - row.retries - lost - deaths)
            # the budget of reissues is that of one life of the buffer, and of one training
            within = again[0] <= retries
            within = within and again[1] <= budget.max_reissues * (self._num_lives + lost)
            self._expect(within, "I3", f"{row.group_id}: (retries, reissues) {again}")
            events = [(event.event, event.detail) for event in ledger.events(row.group_id)]
            torn = any(a[0] == "batched" and b[1] == "stale" for a, b in itertools.pairwise(events))
            self._expect(taken_over or not torn, "I2", f"the verdicts on {row.group_id} differ")
            handled = [d for event, d in events if event in {"retried", "masked"} and d]
            filtered = any(detail.startswith("filter:") for detail in handled)
            self._expect(not filtered, "I3", f"{row.group_id} was filtered, and went on: {events}")
        handed = {(g.group_id, g.attempt) for r in self._world.batches for g in r.batch.groups}
        table = self._world.buffer._table
        states = ledger.counts()
        places = {
            "issued": len(table.waiting) + len(table.stored),
            "claimed": len(table.in_flight),
            "finished": table.num_queued,
            "batched": len(table.batched()),
        }
        for state, count in places.items():
            self._expect(states[state] == count, "I3", f"{state}: {states[state]} != {count}")
        open_now = places["claimed"] + places["finished"]
        self._expect(
            open_now <= self._plan.config.most_open_groups,
            "I5",
            f"{open_now} groups are open at the end",
        )
        for row in ledger.groups("trained"):
            self._expect((row.group_id, row.attempt) in handed, "I3", f"{row} was never handed out")
        self._trained_once()

    def _trained_once(self) -> None:
        """What the models were trained on, term by term, is what the ledger says."""
        for trainer in self._world.trainers:
            counts = Counter(trainer.backend.applied)
            again = [key for key, count in counts.items() if count > 1]
            self._expect(not again, "I3", f"{trainer.name} trained twice: {again}")
        newest = set(self._world.backend.applied)
        last = set(self._world.backend.applied[-self._plan.config.buffer.batch_groups :])
        rows = self._world.ledger.groups("trained", "committed")
        told = {row.group_id: row.attempt for row in rows}
        missing = {key for key in newest - last if told.get(key[0]) != key[1]}
        self._expect(not missing, "I3", f"trained, and the ledger does not know: {missing}")
        if self._world.checkpoints is not None:
            robbed = [trainer.name for trainer in self._world.trainers if trainer.robbed]
            self._expect(not robbed, "I10", f"no checkpoint is there for {robbed}")
            for problem in trainers.check(self._world):
                self._expect(False, "I3", problem)
