"""What must hold at the end of a small world: I1 to I4, I7 and I8, from what is left of it.

Consumes a `SmallWorld` that has run to its end; produces a list of what does not hold.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.simulation.records import distance, is_a_life
from tests.simulation.small_actors import NUM_STEPS, TRAINER, WORKER
from tests.simulation.token_checks import check_group

from ratchet.actors.role import BUFFER, ORDERLY

if TYPE_CHECKING:
    from tests.simulation.small_world import SmallWorld

Problems = Iterator[tuple[bool, str]]
"""(it holds, what is wrong otherwise)"""


def check(world: SmallWorld) -> list[str]:
    """Return what is wrong."""
    found = list(world.problems)
    for look in (_ended_well, _staleness, _conservation, _training, _versions, _stamps):
        try:
            found += [problem for holds, problem in look(world) if not holds]
        except Exception as error:  # noqa: BLE001 - a check that cannot be made is a finding
            found.append(f"{look.__name__}: {type(error).__name__}: {error}")
    return found


def _ended_well(world: SmallWorld) -> Problems:
    done = [(s["status"], s["steps"]) for s in world.summaries]
    yield done == [("finished", NUM_STEPS)], f"I7: the run ended with {world.summaries}"
    for life in world.lives:
        fine = life.end in (ORDERLY, "killed")
        yield fine, f"I7: {life.name}/{life.number} ended: {life.end or 'it hangs'}"
        engine = life.parts.engine if life.parts else None
        paused = engine is not None and engine._paused and life.end != "killed"
        yield not paused, f"I7: {life.name}/{life.number} is paused"
    kills = sum(life.end == "killed" for life in world.lives)
    yield kills == world.num_deaths, f"I7: {kills} were killed"
    yield not world.leaks, f"I7: {world.leaks}"


def _staleness(world: SmallWorld) -> Problems:
    records = {record.version: record for record in world.stage.store.records()}
    handed = {(g.group_id, r.batch.step): g for r in world.batches for g in r.batch.groups}
    for row in world.stage.ledger.groups("trained"):
        assert row.trained_version is not None
        group = handed[row.group_id, row.trained_step or 0]
        for version in group.versions:
            stale = distance(records, version, row.trained_version)
            within = 0 <= stale <= world.scenario.max_staleness
            yield within, f"I2: group {row.group_id} is {stale} steps stale"
        step = records[row.trained_version].step + 1
        yield step == row.trained_step, f"I2: step {row.trained_step}, not {step}"


def _conservation(world: SmallWorld) -> Problems:
    ledger = world.stage.ledger
    rows = ledger.groups()
    twice = [k for k, n in Counter((r.prompt_id, r.epoch) for r in rows).items() if n > 1]
    yield not twice, f"I3: issued twice in an epoch: {twice}"
    for row in rows:
        events = [(event.event, event.detail) for event in ledger.events(row.group_id)]
        names = [name for name, _ in events]
        yield names.count("trained") <= 1, f"I3: trained twice: {events}"
        yield is_a_life(names), f"I3: group {row.group_id} went {events}"
        pairs = itertools.pairwise(events)
        torn = any(a == "batched" and b[1] == "stale" for (a, _), b in pairs)
        fenced = world.scenario.victim == TRAINER
        yield fenced or not torn, f"I2: the verdicts on group {row.group_id} differ"
    table = world.newest[BUFFER].actor._table
    places = {
        "issued": len(table.waiting),
        "claimed": len(table.in_flight),
        "finished": table.num_queued,
        "batched": len(table.batched()),
    }
    counts = ledger.counts()
    yield places.items() <= counts.items(), f"I3: {places} and {counts}"


def _training(world: SmallWorld) -> Problems:
    rows = world.stage.ledger.groups("trained")
    told = {row.group_id: row.attempt for row in rows}
    for life in world.lives:
        if life.name != TRAINER:
            continue
        applied = life.parts.backend.applied
        again = len(applied) - len(set(applied))
        yield not again, f"I3: trained twice: {applied}"
        last = life is world.newest[TRAINER]
        missing = [key for key in applied[:-1] if last and told.get(key[0]) != key[1]]
        yield not missing, f"I3: trained, and not in the ledger: {missing}"


def _versions(world: SmallWorld) -> Problems:
    records = world.stage.store.records()
    sent = world.stage.wire.sent
    numbers = [record.version for record in records]
    yield numbers == list(range(len(numbers))), f"I1: numbers {numbers}"
    stamped = {}
    for life in world.lives:
        held = [] if life.name != WORKER else life.parts.engine.stamped
        order = [version for version, _ in held]
        yield order == sorted(order), f"I1: an engine held {order}"
        for version, weights in held:
            same = bool((weights == sent[version]).all())
            yield same, f"I4: {life.name} holds other weights than {version}"
            stamped[version] = weights
    for record in records:
        held_by_one = record.state != "live" or record.version in stamped
        yield held_by_one, f"I4: {record} was never held"
        if record.version in sent:
            steps = int(sent[record.version][0])
            yield steps == record.step, f"I8: {record} has {steps} steps in it"


class _Sent:
    """What `check_group` looks at."""

    def __init__(self, world: SmallWorld) -> None:
        self.wire = world.stage.wire


def _stamps(world: SmallWorld) -> Problems:
    for ready in world.batches:
        for group in ready.batch.groups:
            try:
                check_group(_Sent(world), group)  # type: ignore[arg-type]
            except (AssertionError, KeyError) as error:
                yield False, f"I4: {type(error).__name__} {error}"
