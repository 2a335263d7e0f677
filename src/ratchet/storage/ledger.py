"""The life of every prompt group, from issue to training: ledger.sqlite.

Consumes the decisions of its one writer, the BufferActor; produces the rows that a restarted buffer
goes on from, and that people read. Waits for nothing but a rare checkpoint of the write-ahead log.

Transitions collect in one transaction until `flush`. Rule for the writer: flush before anything
that follows from a transition leaves the actor (prompts to a worker, a batch to the trainer). Then
whatever others know survives the death of the process (a kill -9); a power cut may take the last
flushes, and the processes with them (`synchronous=NORMAL`). Issuing prompts and saving the
cursor in one flush keeps the cursor from running ahead of the groups. A transition that raises
leaves no trace. Times are wall clock seconds, for people only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import msgspec

from ratchet.storage import transitions
from ratchet.storage.groups import (
    LIFE,
    SCHEMA,
    SELECT,
    STATES,
    Cursor,
    GroupEvent,
    GroupRow,
    read_events,
    read_groups,
)
from ratchet.storage.sqlite import Database
from ratchet.storage.transitions import LedgerError, Transitions
from ratchet.types import GroupState, PolicyVersion

__all__ = [
    "Cursor",
    "GroupEvent",
    "GroupLedger",
    "GroupRow",
    "LedgerError",
    "read_events",
    "read_groups",
]


class GroupLedger:
    """The single writer of the groups, their events and the data cursor."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = database.connection
        self._transitions = Transitions(self._sql)
        row = self._sql.execute("SELECT coalesce(max(group_id), -1) FROM groups").fetchone()
        self._last_id: int = row[0]

    @classmethod
    def open(cls, path: Path | None, *, run: str | None = None) -> GroupLedger:
        """Open or create the file; None keeps it in memory.

        Raises:
            UserError: if the file is damaged, newer, of another kind or run, or has a writer.
        """
        return cls(Database.open(path, SCHEMA, synchronous="NORMAL", run=run))

    @property
    def run(self) -> str:
        """Id of the run that the file belongs to."""
        return self._database.run

    def issue(self, prompt_id: str, epoch: int, now: float, *, to: str | None = None) -> int:
        """Begin a group for a prompt and return its id, from 0; hand it to a worker at once if one
        is named.
        """
        group_id = self._last_id + 1
        self._transitions.begin()
        self._sql.execute(transitions.ISSUE, (group_id, prompt_id, epoch, now, to))
        self._last_id = group_id
        return group_id

    def claim(self, group_id: int, attempt: int, worker: str, now: float) -> None:
        """Hand an issued group to a worker.

        Raises:
            LedgerError: if the group is not issued, or at another attempt.
        """
        self._transitions.one(transitions.CLAIM, (worker, now, group_id, attempt), group_id)

    def finish(  # noqa: PLR0913 - a result has these columns
        self,
        group_id: int,
        attempt: int,
        *,
        min_version: PolicyVersion | None,
        max_version: PolicyVersion | None,
        reward_mean: float | None,
        reward_std: float | None,
        num_tokens: int,
        num_rollouts: int,
        now: float,
        requeued: bool = False,
    ) -> None:
        """Note the result of a claimed group; or `requeued`, of an issued one, from its payload.

        Raises:
            LedgerError: if the group is not claimed (issued), or at another attempt.
        """
        result = (min_version, max_version, reward_mean, reward_std, num_tokens, num_rollouts)
        move = transitions.REQUEUE if requeued else transitions.FINISH
        self._transitions.one(move, (*result, now, group_id, attempt), group_id)

    def mask(self, group_id: int, reason: str, now: float) -> None:
        """Note that only a part of a finished group will be trained.

        Raises:
            LedgerError: if the group is not finished.
        """
        with self._transitions.whole():
            self._transitions.one(transitions.MASK, (reason, group_id), group_id)
            self._sql.execute(transitions.MASKED, (group_id, now, reason))

    def retry(
        self, group_id: int, attempt: int, reason: str, now: float, *, counts: bool = False
    ) -> None:
        """Give up an attempt: a claimed, finished or batched group is issued again.

        Args:
            group_id: the group.
            attempt: the attempt given up; the next one is `attempt + 1`.
            reason: one word.
            now: wall clock.
            counts: the attempt is one of the unused handler's budget.

        Raises:
            LedgerError: if the group is in another state, or at another attempt.
        """
        self._transitions.one(transitions.RETRY, (reason, now, group_id, attempt, counts), group_id)

    def drop(self, group_id: int, reason: str, now: float) -> None:
        """End a group that will not be trained.

        Raises:
            LedgerError: if the group is trained, committed or dropped already.
        """
        self._transitions.one(transitions.DROP, (reason, now, group_id), group_id)

    def batch(
        self, group_ids: Iterable[int], step: int, staleness: Mapping[int, int], now: float
    ) -> None:
        """Put finished groups into the batch of a step; all of them or none.

        Raises:
            LedgerError: if a group is not finished, or named twice.
        """
        ids = tuple(sorted(group_ids))
        named = {group_id: staleness[group_id] for group_id in ids}
        self._transitions.all_of(transitions.BATCH, (step, now), ids, named)

    def train(
        self, group_ids: Iterable[int], step: int, version: PolicyVersion, now: float
    ) -> None:
        """Note that a step trained the groups of its batch; all of them or none.

        Raises:
            LedgerError: if a group is not in the batch of that step, or named twice.
        """
        ids = tuple(sorted(group_ids))
        self._transitions.all_of(transitions.TRAIN, (version, now, step), ids, ids)

    def trained_steps(self) -> tuple[tuple[PolicyVersion, int], ...]:
        """Return (version that the step started from, step) of all that trained a group, whether or
        not a checkpoint has it.
        """
        rows = self._sql.execute(
            "SELECT DISTINCT trained_version, trained_step FROM groups"
            " WHERE state IN ('trained', 'committed')"
        )
        return tuple(rows.fetchall())

    def lose(
        self, version: PolicyVersion, step: int, reason: str, now: float
    ) -> tuple[GroupRow, ...]:
        """Issue the groups again that a step trained whose result is lost; return them."""
        self._transitions.begin()
        rows = self._sql.execute(transitions.LOSE, (version, step, reason, now)).fetchall()
        return tuple(sorted((GroupRow(*row) for row in rows), key=lambda row: row.group_id))

    def commit(self, step: int, now: float) -> tuple[int, ...]:
        """Note that a checkpoint has what was trained up to a step; return these groups' ids."""
        self._transitions.begin()
        return tuple(
            row[0] for row in self._sql.execute(transitions.COMMIT, (now, step)).fetchall()
        )

    def committed_step(self) -> int:
        """Return the newest step of which a group is committed; 0 if there is none."""
        row = self._sql.execute(
            "SELECT coalesce(max(trained_step), 0) FROM groups WHERE state = 'committed'"
        ).fetchone()
        return cast("int", row[0])

    def save_cursor(self, epoch: int, position: int) -> None:
        """Note where the next prompt comes from; durable with the next flush."""
        self._transitions.begin()
        self._sql.execute("INSERT OR REPLACE INTO cursor VALUES (0, ?, ?)", (epoch, position))

    def load_cursor(self) -> Cursor:
        """Return where the next prompt comes from; (0, 0) at first."""
        row = self._sql.execute("SELECT epoch, position FROM cursor").fetchone()
        return Cursor(*row) if row is not None else Cursor(0, 0)

    @property
    def is_dirty(self) -> bool:
        """There are transitions that a flush would make durable."""
        return self._sql.in_transaction

    def flush(self) -> None:
        """Make every transition so far durable; does nothing if there is none."""
        if self._sql.in_transaction:
            self._sql.execute("COMMIT")

    def counts(self) -> dict[str, int]:
        """Return the number of groups in each state; together they are all groups ever issued."""
        rows = self._sql.execute("SELECT state, count(*) FROM groups GROUP BY state")
        return {**dict.fromkeys(STATES, 0), **dict(rows.fetchall())}

    def reasons(self) -> dict[str, int]:
        """Return the number of dropped groups by reason."""
        rows = self._sql.execute(
            "SELECT reason, count(*) FROM groups WHERE state = 'dropped' GROUP BY reason"
        )
        return dict(rows.fetchall())

    def groups(self, *states: GroupState) -> tuple[GroupRow, ...]:
        """Return the groups in any of these states (of all states if none is named), by id."""
        names = msgspec.json.encode(states or STATES).decode()
        return tuple(GroupRow(*row) for row in self._sql.execute(SELECT, (names, None)))

    def group(self, group_id: int) -> GroupRow | None:
        """Return one group, or None if the id was never issued."""
        row = self._sql.execute("SELECT * FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        return GroupRow(*row) if row is not None else None

    def events(self, group_id: int) -> tuple[GroupEvent, ...]:
        """Return the life of a group, in order."""
        return tuple(GroupEvent(*row) for row in self._sql.execute(LIFE, (group_id,)))

    def abandon(self) -> None:
        """Close the file without what is not durable yet, as a crash would."""
        self._database.close()

    def close(self) -> None:
        """Flush and close the file; closing again does nothing."""
        if self._database.is_open:
            self.flush()
        self._database.close()
