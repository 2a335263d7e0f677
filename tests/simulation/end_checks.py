"""What must hold of a whole run, and can be seen at its end only.

Consumes a world that has ended, produces the invariants that broke: I2 staleness, I3 conservation,
I4 stamps, I7 the run ends well, I8 nothing that is not finite is published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set
from typing import TYPE_CHECKING

import numpy as np
from tests.simulation import batch_marks, counter_checks, evaluation_checks, supervision
from tests.simulation.conservation_checks import ConservationChecks
from tests.simulation.faults import Revive
from tests.simulation.records import distance
from tests.simulation.token_checks import check_group

from ratchet.actors.role import BUFFER, LOST, ORDERLY, REGISTRY

if TYPE_CHECKING:
    from tests.simulation.plan import Plan
    from tests.simulation.world import World

_OUTSIDE = ("AskTimeout", "ActorDead", "given up", "lost the registry", "of the engine is lost")
"""Why a worker may end on its own: the world has cut it off, or broken its engine."""

_FENCED = (
    "fenced by term",
    "not the newest",
    "refuses term",
    "waited",
    "taken over",
    "has taken the name",
    "has been replaced",
)
"""How an older trainer may end: told so, or not heard any more."""

_TAKE_OVERS = {"TakeOver", "TakeOverInTransfer", "KillTrainer", "LoseNode"}
"""Faults after which another trainer may go on, from elsewhere."""


class EndChecks:
    """Of one world."""

    def __init__(
        self,
        plan: Plan,
        world: World,
        expect: Callable[[bool, str, str], None],
        *,
        held_versions: Set[int],
        num_lives: int,
    ) -> None:
        """Look at a world that has ended.

        Args:
            plan: of the world.
            world: itself.
            expect: told of each invariant.
            held_versions: those that an engine was stamped with.
            num_lives: of the buffer.
        """
        self._plan = plan
        self._world = world
        self._expect = expect
        self._held_versions = held_versions
        taken = any(fault.kind in _TAKE_OVERS for fault in plan.faults)
        self._another_trains = taken or plan.has_standby
        """A trainer may go on from where another was, and not from where that is by then."""
        self._conservation = ConservationChecks(
            plan, world, expect, num_lives=num_lives, another_trains=self._another_trains
        )

    def check(self, *, fatal: bool) -> None:
        """Check all of it; of a run that something has ended, what holds of that too."""
        for problem in supervision.check(self._world, heard=not (fatal or self._plan.blinds)):
            self._expect(False, "I7", problem)
        if fatal:
            self._everyone_left()
            self._staleness()
            self._stamps()
            self._publications()
            return
        for check in (
            self._run_ended_well,
            self._nothing_crashed,
            self._staleness,
            self._conservation.check,
            self._stamps,
            self._publications,
            self._evaluations,
            self._marks,
            self._counters,
            self._nobody_is_paused,
        ):
            try:
                check()
            except Exception as error:  # noqa: BLE001 - a check that cannot be made is a finding
                self._expect(False, check.__name__, f"{type(error).__name__}: {error}")

    def _run_ended_well(self) -> None:
        world, plan = self._world, self._plan
        if not world.ended.event.is_set():
            self._expect(world.told_of_end, "I7", "the run did not end")
            return
        summaries = world.output.summaries
        if (supervision.ended_the_run(world) or world.over) and len(summaries) <= 1:
            return
        self._expect(len(summaries) == 1, "I7", f"summaries: {summaries}")
        status, reason = summaries[-1]["status"], str(summaries[-1]["reason"])
        if status == "failed":
            allowed = any(text in reason for text in plan.may_fail)
            allowed = allowed or ("waited" in reason and supervision.nobody_left(world))
            self._expect(allowed, "I7", f"the run failed: {reason}")
        elif status == "stopped":
            self._expect(reason == "enough", "I7", f"stopped: {reason}")
        else:
            steps = summaries[-1]["steps"]
            self._expect(steps == plan.config.trainer.num_steps, "I7", f"{steps} steps")
        for trainer in world.trainers:
            for summary in trainer.output.summaries if trainer is not world.leader else ():
                fenced = any(word in str(summary["reason"]) for word in _FENCED)
                # one that is out of reach for longer ends no run that has a standby
                fenced |= plan.has_standby and LOST in str(summary["reason"])
                fine = fenced or summary["status"] in {"finished", "stopped"}
                fine = fine or any(text in str(summary["reason"]) for text in plan.may_fail)
                self._expect(fine, "I7", f"an old trainer: {summary}")

    def _everyone_left(self) -> None:
        """Without a registry no role goes on."""
        if self._world.network.alive(REGISTRY) or self._plan.blinds:
            return
        # a worker is started again and again, and waits for a registry each time
        again = ("rollout", "evaluator", "launcher", *(["trainer"] if self._plan.save_s else []))
        left = [name for name in self._world.network.living() if not name.startswith(again)]
        self._expect(not left, "I7", f"the registry is gone, and {left} go on")

    def _nothing_crashed(self) -> None:
        for name in (REGISTRY, BUFFER):
            end = self._world.ends[name]
            in_order = end.reason == ORDERLY and end.host.system.run_ended is not None
            revived = {fault.name for fault in self._plan.faults if isinstance(fault, Revive)}
            is_down = end.reason == "killed" and name in revived  # and the run did not wait
            fine = in_order or is_down or not end.event.is_set()
            if name == BUFFER and self._world.over:
                # the registry may have ended before this life of the buffer came to it, or heard
                joined = self._world.network.hosts[REGISTRY].log.named("role_joined")
                unheard = end.host.incarnation not in {fields["life"] for fields in joined}
                unheard = unheard or self._plan.blinds
                fine = fine or (LOST in end.reason and unheard)
            self._expect(fine, "I7", f"{name} ended: {end.reason}")
        for name, reason in self._world.lost_workers:
            # a worker that cannot reach the registry, or was given up, starts again
            self._expect(
                any(word in reason for word in _OUTSIDE),
                "I7",
                f"{name} ended: {reason}",
            )

    def _staleness(self) -> None:
        records = {record.version: record for record in self._world.store.records()}
        accepted = list(self._world.ledger.groups("trained"))
        trained: dict[tuple[int, int], set[int]] = {}
        for trainer in self._world.trainers:
            trained |= trainer.backend.trained_versions
        bound = self._plan.config.buffer.max_staleness
        # the tokens of an earlier trainer are of another branch, whatever was admitted
        unbroken = not self._another_trains
        for row in accepted:
            assert row.trained_version is not None
            for version in trained[row.group_id, row.attempt]:
                stale = distance(records, version, row.trained_version)
                self._expect(
                    0 <= stale <= bound,
                    "I2",
                    f"group {row.group_id} with tokens of {version} was trained by"
                    f" {row.trained_version}: {stale} steps apart, at most {bound} allowed",
                )
                if self._plan.config.trainer.synchronous and unbroken:
                    self._expect(stale == 0, "I2", f"synchronous, and {stale} steps stale")
            step = records[row.trained_version].step + 1
            self._expect(step == row.trained_step, "I2", f"step {row.trained_step}, not {step}")
        if unbroken and self._plan.config.buffer.admission == "bounded":
            self._nothing_was_stale()

    def _nothing_was_stale(self) -> None:
        for row in self._world.ledger.groups():
            events = self._world.ledger.events(row.group_id)
            stale = [event for event in events if event.detail == "stale"]
            self._expect(not stale, "I2", f"bounded, and group {row.group_id} was too old: {stale}")

    def _stamps(self) -> None:
        for ready in self._world.batches:
            for group in ready.batch.groups:
                size = self._plan.config.rollout.group_size
                self._expect(len(group.trajectories) == size, "I4", f"{group.group_id} is torn")
                failed = [r for r in group.rollouts if r.finish_reason in {"abort", "error"}]
                used = any(1 in rollout.loss_mask.data for rollout in failed)
                self._expect(not used, "I3", f"{group.group_id} trains what was aborted")
                try:
                    check_group(self._world, group)
                except (AssertionError, KeyError) as error:
                    self._expect(False, "I4", f"{type(error).__name__} {error}")

    def _publications(self) -> None:
        """Weights are finite, each version has the weights of its step, numbers are not reused."""
        records = self._world.store.records()
        numbers = [record.version for record in records]
        self._expect(numbers == list(range(len(numbers))), "I1", f"numbers {numbers}")
        for record in records:
            weights = self._world.wire.sent.get(record.version)
            if weights is None:
                self._expect(record.state != "live", "I4", f"{record} is live and was never sent")
                continue
            held = record.version in self._held_versions
            self._expect(record.state != "live" or held, "I4", f"no engine ever held {record}")
            self._expect(bool(np.isfinite(weights).all()), "I8", f"{record.version} is not finite")
            self._expect(
                int(weights[0]) == record.step,
                "I8",
                f"version {record.version} of step {record.step} has {int(weights[0])} steps in it",
            )

    def _evaluations(self) -> None:
        """A result is of one version."""
        for problem in evaluation_checks.check(self._world):
            self._expect(False, "I4", problem)

    def _counters(self) -> None:
        for problem in counter_checks.check(self._world.buffer):
            self._expect(False, "I3", problem)

    def _marks(self) -> None:
        """What the batch filter has marked is not trained."""
        for problem in batch_marks.check(self._world):
            self._expect(False, "I2", problem)

    def _nobody_is_paused(self) -> None:
        for worker in self._world.workers.values():
            alive = worker.host.lives
            loading = any(
                task.get_name().startswith(f"{worker.name}.load-") for task in asyncio.all_tasks()
            )
            self._expect(
                not (alive and worker.engine._paused and not loading), "I7", f"{worker.name} paused"
            )
