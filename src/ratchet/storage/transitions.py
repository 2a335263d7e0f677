"""The transitions of groups in SQL: from which state, what they write, and how they run.

Consumes the arguments of a transition, changes rows, in a transaction that begins with the first
and that somebody else commits; waits for nothing. Each statement moves only groups that stand where
the transition may begin, and how many those were says whether it was allowed. The triggers of the
schema write the events.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NoReturn

import msgspec

from ratchet.errors import RatchetError
from ratchet.storage.groups import GroupRow

ISSUE: Final = """
    INSERT INTO groups
        (group_id, prompt_id, epoch, issued_at, changed_at, worker, state, claimed_at)
    VALUES (?1, ?2, ?3, ?4, ?4, ?5,
        iif(?5 IS NULL, 'issued', 'claimed'), iif(?5 IS NULL, NULL, ?4))"""
CLAIM: Final = """
    UPDATE groups SET state = 'claimed', reason = NULL, worker = ?1, claimed_at = ?2,
        changed_at = ?2
    WHERE group_id = ?3 AND attempt = ?4 AND state = 'issued'"""
FINISH: Final = """
    UPDATE groups SET state = 'finished', min_version = ?1, max_version = ?2, reward_mean = ?3,
        reward_std = ?4, num_tokens = ?5, num_rollouts = ?6, finished_at = ?7, changed_at = ?7
    WHERE group_id = ?8 AND attempt = ?9 AND state = 'claimed'"""
REQUEUE: Final = FINISH.replace("SET", "SET reason = NULL,").replace("'claimed'", "'issued'")
RETRY: Final = """
    UPDATE groups SET state = 'issued', attempt = attempt + 1, retries = retries + ?5,
        reason = ?1, worker = NULL, min_version = NULL, max_version = NULL, staleness = NULL,
        trained_step = NULL, reward_mean = NULL, reward_std = NULL, num_tokens = NULL,
        num_rollouts = NULL, claimed_at = NULL, finished_at = NULL, changed_at = ?2
    WHERE group_id = ?3 AND attempt = ?4 AND state IN ('claimed', 'finished', 'batched')"""
MASK: Final = """
    UPDATE groups SET reason = ?1 WHERE group_id = ?2 AND state = 'finished'"""
MASKED: Final = "INSERT INTO events VALUES (?, ?, 'masked', ?)"
LOSE: Final = """
    UPDATE groups SET state = 'issued', attempt = attempt + 1, reason = ?3, worker = NULL,
        min_version = NULL, max_version = NULL, staleness = NULL, trained_step = NULL,
        trained_version = NULL, reward_mean = NULL, reward_std = NULL, num_tokens = NULL,
        num_rollouts = NULL, claimed_at = NULL, finished_at = NULL, trained_at = NULL,
        changed_at = ?4
    WHERE trained_version = ?1 AND trained_step = ?2 AND state IN ('trained', 'committed')
    RETURNING *"""
COMMIT: Final = """
    UPDATE groups SET state = 'committed', changed_at = ?1
    WHERE state = 'trained' AND trained_step <= ?2
    RETURNING group_id"""
DROP: Final = """
    UPDATE groups SET state = 'dropped', reason = ?1, trained_step = NULL, changed_at = ?2
    WHERE group_id = ?3 AND state IN ('issued', 'claimed', 'finished', 'batched')"""
# One statement for a whole batch: within a savepoint, the cost of each further statement grows with
# the pages that the earlier ones have changed. The groups are named in the order of the table, in
# which SQLite walks them. The plus in TRAIN keeps it off the index on steps.
BATCH: Final = """
    UPDATE groups SET state = 'batched', trained_step = ?1, staleness = named.value, changed_at = ?2
    FROM json_each(?3) AS named
    WHERE group_id = CAST(named.key AS INTEGER) AND state = 'finished'
    RETURNING group_id"""
TRAIN: Final = """
    UPDATE groups SET state = 'trained', trained_version = ?1, trained_at = ?2, changed_at = ?2
    FROM json_each(?4) AS named
    WHERE group_id = named.value AND trained_step = ?3 AND +state = 'batched'
    RETURNING group_id"""


class LedgerError(RatchetError):
    """A transition that the state of the group does not allow; nothing was written."""


class Transitions:
    """Runs them. One that raises leaves no trace, and the others of its transaction alone."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._sql = connection

    def begin(self) -> None:
        """Begin a transaction, unless one is open."""
        if not self._sql.in_transaction:
            self._sql.execute("BEGIN IMMEDIATE")

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Undo what is written within the block if it raises."""
        self.begin()
        self._sql.execute("SAVEPOINT change")
        try:
            yield
        except BaseException:
            self._sql.execute("ROLLBACK TO change")
            raise
        finally:
            self._sql.execute("RELEASE change")

    def one(self, update: str, arguments: Sequence[Any], group_id: int) -> None:
        """Move one group.

        Raises:
            LedgerError: if it does not stand where the transition begins.
        """
        self.begin()
        if self._sql.execute(update, arguments).rowcount != 1:
            self._refuse(update, arguments, group_id)

    def all_of(
        self, update: str, arguments: Sequence[Any], group_ids: Sequence[int], named: object
    ) -> None:
        """Move all of these groups or none, in one statement, whose last argument names them.

        Raises:
            LedgerError: if one does not stand where the transition begins, or is named twice.
        """
        last = msgspec.json.encode(named).decode()
        with self.whole():
            moved = {row[0] for row in self._sql.execute(update, (*arguments, last))}
            if len(moved) == len(group_ids):
                return
            self._sql.execute("ROLLBACK TO change")
            for group_id in group_ids:
                if group_id not in moved:
                    self._refuse(update, arguments, group_id)
            msg = f"a group is named twice in {group_ids}"
            raise LedgerError(msg)

    def _refuse(self, update: str, arguments: Sequence[Any], group_id: int) -> NoReturn:
        row = self._sql.execute("SELECT * FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        wanted = " ".join(update.partition("WHERE")[2].partition("RETURNING")[0].split())
        if row is None:
            msg = f"group {group_id} was never issued"
        else:
            group = GroupRow(*row)
            msg = (
                f"group {group_id} is {group.state} at attempt {group.attempt} (step"
                f" {group.trained_step}), where the transition needs {wanted} with {arguments}"
            )
        raise LedgerError(msg)
