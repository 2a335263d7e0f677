"""A table of groups with a ledger in memory, and what its workers may finish."""

from __future__ import annotations

from collections.abc import Callable

from tests.helpers.training import make_groups

from ratchet.actors.entry import Entry
from ratchet.actors.group_table import GroupTable
from ratchet.actors.prompt_source import PromptSource
from ratchet.storage.ledger import GroupLedger
from ratchet.types import Prompt, RolloutGroup

WORKERS = [("r0", "a"), ("r0", "b"), ("r1", "a")]
GROUPS = make_groups(5, 2)


def group_of(entry: Entry) -> RolloutGroup:
    rollouts = GROUPS[(entry.group_id + entry.attempt) % len(GROUPS)].rollouts
    return RolloutGroup(
        entry.group_id, entry.attempt, entry.prompt.prompt_id, entry.epoch, rollouts
    )


def make_table(
    max_reissues: int = 1, now: Callable[[], float] = lambda: 1.0
) -> tuple[GroupTable, GroupLedger]:
    ledger = GroupLedger.open(None)
    source = PromptSource([Prompt(f"p{i}", f"{i}>") for i in range(3)], seed=0)
    table = GroupTable(ledger, source, wall_time=lambda: 1.0, now=now, max_reissues=max_reissues)
    return table, ledger
