"""The tables of ledger.sqlite: their schema, what a row means, and reading them.

Consumes a file that a `GroupLedger` writes, produces rows. Waits for nothing: a reader and the
writer do not stand in each other's way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple, get_args

import msgspec

from ratchet.storage.sqlite import Schema, open_reader, refusals
from ratchet.types import GroupState, PolicyVersion

_CHANGED: Final = """
    CREATE TRIGGER group_changed AFTER UPDATE OF state ON groups BEGIN
        INSERT INTO events VALUES (
            NEW.group_id,
            NEW.changed_at,
            CASE
                WHEN NEW.state = 'issued' THEN 'retried'
                WHEN NEW.state = 'finished' AND OLD.state = 'issued' THEN 'requeued'
                ELSE NEW.state
            END,
            CASE NEW.state
                WHEN 'claimed' THEN NEW.worker
                WHEN 'issued' THEN NEW.reason
                WHEN 'dropped' THEN NEW.reason
                ELSE CAST(NEW.trained_step AS TEXT)
            END
        );
    END;"""

_ISSUED: Final = """
    CREATE TRIGGER group_issued AFTER INSERT ON groups BEGIN
        INSERT INTO events VALUES (NEW.group_id, NEW.changed_at, 'issued', NULL);
        INSERT INTO events SELECT NEW.group_id, NEW.changed_at, 'claimed', NEW.worker
            WHERE NEW.state = 'claimed';
    END;"""

# The one index: for the groups that a checkpoint commits. What everyone else reads, a person or a
# start, is read in one pass over the tables, as the check of a file that is opened reads it anyway:
# an index on all states or on the events of a group costs each transition two more places to find
# in a tree that grows with what is open.
_TRAINED_INDEX: Final = (
    "CREATE INDEX groups_trained ON groups (trained_step) WHERE state = 'trained';"
)

SCHEMA: Final = Schema(
    kind="ledger",
    version=3,
    tables=f"""
    CREATE TABLE groups (
        group_id INTEGER PRIMARY KEY CHECK (group_id >= 0),
        prompt_id TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        attempt INTEGER NOT NULL DEFAULT 0,
        retries INTEGER NOT NULL DEFAULT 0,
        state TEXT NOT NULL DEFAULT 'issued',
        reason TEXT,
        worker TEXT,
        min_version INTEGER,
        max_version INTEGER,
        staleness INTEGER,
        trained_step INTEGER,
        trained_version INTEGER,
        reward_mean REAL,
        reward_std REAL,
        num_tokens INTEGER,
        num_rollouts INTEGER,
        issued_at REAL NOT NULL,
        claimed_at REAL,
        finished_at REAL,
        trained_at REAL,
        changed_at REAL NOT NULL
    ) STRICT;
    {_TRAINED_INDEX}
    CREATE TABLE events (
        group_id INTEGER NOT NULL,
        at REAL NOT NULL,
        event TEXT NOT NULL,
        detail TEXT
    ) STRICT;
    {_ISSUED}
    {_CHANGED}
    CREATE TABLE cursor (
        id INTEGER PRIMARY KEY CHECK (id = 0),
        epoch INTEGER NOT NULL,
        position INTEGER NOT NULL
    ) STRICT;
    """,
    migrations=(
        # 2: committed, requeued; no index that every transition changes
        f"DROP TRIGGER group_changed; {_CHANGED} DROP INDEX groups_by_state;"
        f" DROP INDEX events_by_group; {_TRAINED_INDEX}",
        # 3: issued to a worker at once
        f"DROP TRIGGER group_issued; {_ISSUED}",
    ),
)

STATES: Final[tuple[GroupState, ...]] = get_args(GroupState)

SELECT: Final = """
    SELECT * FROM groups WHERE state IN (SELECT value FROM json_each(?1))
        AND (?2 IS NULL OR ?2 BETWEEN min_version AND max_version)
    ORDER BY group_id"""
LIFE: Final = "SELECT * FROM events WHERE group_id = ? ORDER BY rowid"


class Cursor(NamedTuple):
    """Where the next prompt comes from."""

    epoch: int
    position: int


class GroupRow(msgspec.Struct, frozen=True, rename={"group_id": "group", "prompt_id": "prompt"}):
    """One group, as the ledger knows it. What belongs to a past attempt is None again."""

    group_id: int
    prompt_id: str
    epoch: int
    attempt: int
    """from 0; one more each time that it is issued again"""
    retries: int
    """attempts that the unused handler gave up, of its budget; the other ones ended with a process
    """
    state: GroupState
    reason: str | None
    """why it was dropped, why it waits to be claimed again, or why a part of it is masked"""
    worker: str | None
    min_version: PolicyVersion | None
    max_version: PolicyVersion | None
    staleness: int | None
    """of the oldest token, in optimiser steps, when it was batched"""
    trained_step: int | None
    """the optimiser step that it is batched for, or was trained by"""
    trained_version: PolicyVersion | None
    """the version that this step started from"""
    reward_mean: float | None
    reward_std: float | None
    num_tokens: int | None
    num_rollouts: int | None
    issued_at: float
    claimed_at: float | None
    finished_at: float | None
    trained_at: float | None
    changed_at: float
    """when it came into its state"""


class GroupEvent(msgspec.Struct, frozen=True):
    """One event in the life of a group."""

    group_id: int
    at: float
    event: str
    """issued | claimed | finished | masked | retried | requeued (finished, from its payload) |
    batched | trained | committed | dropped
    """
    detail: str | None
    """the worker that claimed, the reason of a mask, retry or drop, the step of a batch, a training
    or a commit
    """


def read_groups(
    path: Path, *, state: GroupState | None = None, version: PolicyVersion | None = None
) -> Iterator[GroupRow]:
    """Yield groups by id, beside a running writer.

    Args:
        path: the file.
        state: only groups in this state.
        version: only groups whose tokens' versions span this one.

    Raises:
        UserError: if the file is missing, damaged, newer or of another kind.
    """
    with closing(open_reader(path, SCHEMA)) as connection, refusals(path):
        names = msgspec.json.encode(STATES if state is None else [state]).decode()
        for row in connection.execute(SELECT, (names, version)):
            yield GroupRow(*row)


def read_life(path: Path, group_id: int) -> tuple[GroupRow, tuple[GroupEvent, ...]] | None:
    """Return one group and its life, of one moment, beside a running writer; None if there is none.

    Raises:
        UserError: if the file is missing, damaged, newer or of another kind.
    """
    with closing(open_reader(path, SCHEMA)) as connection, refusals(path):
        connection.execute("BEGIN")
        query = "SELECT * FROM groups WHERE group_id = ?"
        row = connection.execute(query, (group_id,)).fetchone()
        if row is None:
            return None
        events = connection.execute(LIFE, (group_id,))
        return GroupRow(*row), tuple(GroupEvent(*event) for event in events)


def read_events(path: Path, group_id: int) -> Iterator[GroupEvent]:
    """Yield the life of one group, in order, beside a running writer.

    Raises:
        UserError: if the file is missing, damaged, newer or of another kind.
    """
    with closing(open_reader(path, SCHEMA)) as connection, refusals(path):
        for row in connection.execute(LIFE, (group_id,)):
            yield GroupEvent(*row)
