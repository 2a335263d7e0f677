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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn, cast

import msgspec

from ratchet.errors import RatchetError
from ratchet.storage.groups import (
    LIFE,
    SCHEMA,
    SELECT,
    STATES,
    GroupEvent,
    GroupRow,
    read_events,
    read_groups,
)
from ratchet.storage.sqlite import Database
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


class LedgerError(RatchetError):
    """A transition that the state of the group does not allow; nothing was written."""


class Cursor(NamedTuple):
    """Where the next prompt comes from."""

    epoch: int
    position: int


_ISSUE: Final = """
    INSERT INTO groups (group_id, prompt_id, epoch, issued_at, changed_at)
    VALUES (?1, ?2, ?3, ?4, ?4)"""
_CLAIM: Final = """
    UPDATE groups SET state = 'claimed', reason = NULL, worker = ?1, claimed_at = ?2,
        changed_at = ?2
    WHERE group_id = ?3 AND attempt = ?4 AND state = 'issued'"""
_FINISH: Final = """
    UPDATE groups SET state = 'finished', min_version = ?1, max_version = ?2, reward_mean = ?3,
        reward_std = ?4, num_tokens = ?5, num_rollouts = ?6, finished_at = ?7, changed_at = ?7
    WHERE group_id = ?8 AND attempt = ?9 AND state = 'claimed'"""
_REQUEUE: Final = _FINISH.replace("SET", "SET reason = NULL,").replace("'claimed'", "'issued'")
_RETRY: Final = """
    UPDATE groups SET state = 'issued', attempt = attempt + 1, retries = retries + ?5,
        reason = ?1, worker = NULL, min_version = NULL, max_version = NULL, staleness = NULL,
        trained_step = NULL, reward_mean = NULL, reward_std = NULL, num_tokens = NULL,
        num_rollouts = NULL, claimed_at = NULL, finished_at = NULL, changed_at = ?2
    WHERE group_id = ?3 AND attempt = ?4 AND state IN ('claimed', 'finished', 'batched')"""
_MASK: Final = """
    UPDATE groups SET reason = ?1 WHERE group_id = ?2 AND state = 'finished'"""
_MASKED: Final = "INSERT INTO events VALUES (?, ?, 'masked', ?)"
_LOSE: Final = """
    UPDATE groups SET state = 'issued', attempt = attempt + 1, reason = ?3, worker = NULL,
        min_version = NULL, max_version = NULL, staleness = NULL, trained_step = NULL,
        trained_version = NULL, reward_mean = NULL, reward_std = NULL, num_tokens = NULL,
        num_rollouts = NULL, claimed_at = NULL, finished_at = NULL, trained_at = NULL,
        changed_at = ?4
    WHERE trained_version = ?1 AND trained_step = ?2 AND state IN ('trained', 'committed')
    RETURNING *"""
_COMMIT: Final = """
    UPDATE groups SET state = 'committed', changed_at = ?1
    WHERE state = 'trained' AND trained_step <= ?2
    RETURNING group_id"""
_DROP: Final = """
    UPDATE groups SET state = 'dropped', reason = ?1, trained_step = NULL, changed_at = ?2
    WHERE group_id = ?3 AND state IN ('issued', 'claimed', 'finished', 'batched')"""
# One statement for a whole batch: within a savepoint, the cost of each further statement grows with
# the pages that the earlier ones have changed. The groups are named in the order of the table, in
# which SQLite walks them. The plus in _TRAIN keeps it off the index on steps.
_BATCH: Final = """
    UPDATE groups SET state = 'batched', trained_step = ?1, staleness = named.value, changed_at = ?2
    FROM json_each(?3) AS named
    WHERE group_id = CAST(named.key AS INTEGER) AND state = 'finished'
    RETURNING group_id"""
_TRAIN: Final = """
    UPDATE groups SET state = 'trained', trained_version = ?1, trained_at = ?2, changed_at = ?2
    FROM json_each(?4) AS named
    WHERE group_id = named.value AND trained_step = ?3 AND +state = 'batched'
    RETURNING group_id"""


class GroupLedger:
    """The single writer of the groups, their events and the data cursor."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sql = database.connection
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

    def issue(self, prompt_id: str, epoch: int, now: float) -> int:
        """Begin a group for a prompt and return its id, from 0."""
        group_id = self._last_id + 1
        self._begin()
        self._sql.execute(_ISSUE, (group_id, prompt_id, epoch, now))
        self._last_id = group_id
        return group_id

    def claim(self, group_id: int, attempt: int, worker: str, now: float) -> None:
        """Hand an issued group to a worker.

        Raises:
            LedgerError: if the group is not issued, or at another attempt.
        """
        self._move(_CLAIM, (worker, now, group_id, attempt), group_id)

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
        move = _REQUEUE if requeued else _FINISH
        self._move(move, (*result, now, group_id, attempt), group_id)

    def mask(self, group_id: int, reason: str, now: float) -> None:
        """Note that only a part of a finished group will be trained.

        Raises:
            LedgerError: if the group is not finished.
        """
        with self._all_or_none():
            self._move(_MASK, (reason, group_id), group_id)
            self._sql.execute(_MASKED, (group_id, now, reason))

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
        self._move(_RETRY, (reason, now, group_id, attempt, counts), group_id)

    def drop(self, group_id: int, reason: str, now: float) -> None:
        """End a group that will not be trained.

        Raises:
            LedgerError: if the group is trained, committed or dropped already.
        """
        self._move(_DROP, (reason, now, group_id), group_id)

    def batch(
        self, group_ids: Iterable[int], step: int, staleness: Mapping[int, int], now: float
    ) -> None:
        """Put finished groups into the batch of a step; all of them or none.

        Raises:
            LedgerError: if a group is not finished, or named twice.
        """
        ids = tuple(sorted(group_ids))
        named = {group_id: staleness[group_id] for group_id in ids}
        self._move_all(_BATCH, (step, now), ids, named)

    def train(
        self, group_ids: Iterable[int], step: int, version: PolicyVersion, now: float
    ) -> None:
        """Note that a step trained the groups of its batch; all of them or none.

        Raises:
            LedgerError: if a group is not in the batch of that step, or named twice.
        """
        ids = tuple(sorted(group_ids))
        self._move_all(_TRAIN, (version, now, step), ids, ids)

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
        self._begin()
        rows = self._sql.execute(_LOSE, (version, step, reason, now)).fetchall()
        return tuple(sorted((GroupRow(*row) for row in rows), key=lambda row: row.group_id))

    def commit(self, step: int, now: float) -> tuple[int, ...]:
        """Note that a checkpoint has what was trained up to a step; return these groups' ids."""
        self._begin()
        return tuple(row[0] for row in self._sql.execute(_COMMIT, (now, step)).fetchall())

    def committed_step(self) -> int:
        """Return the newest step of which a group is committed; 0 if there is none."""
        row = self._sql.execute(
            "SELECT coalesce(max(trained_step), 0) FROM groups WHERE state = 'committed'"
        ).fetchone()
        return cast("int", row[0])

    def save_cursor(self, epoch: int, position: int) -> None:
        """Note where the next prompt comes from; durable with the next flush."""
        self._begin()
        self._sql.execute("INSERT OR REPLACE INTO cursor VALUES (0, ?, ?)", (epoch, position))

    def load_cursor(self) -> Cursor:
        """Return where the next prompt comes from; (0, 0) at first."""
        row = self._sql.execute("SELECT epoch, position FROM cursor").fetchone()
        return Cursor(*row) if row is not None else Cursor(0, 0)

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

    def close(self) -> None:
        """Flush and close the file; closing again does nothing."""
        if self._database.is_open:
            self.flush()
        self._database.close()

    def _begin(self) -> None:
        if not self._sql.in_transaction:
            self._sql.execute("BEGIN IMMEDIATE")

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        # a savepoint: what raises leaves the other transitions of this flush alone
        self._begin()
        self._sql.execute("SAVEPOINT change")
        try:
            yield
        except BaseException:
            self._sql.execute("ROLLBACK TO change")
            raise
        finally:
            self._sql.execute("RELEASE change")

    def _move(self, update: str, arguments: Sequence[Any], group_id: int) -> None:
        self._begin()
        if self._sql.execute(update, arguments).rowcount != 1:
            self._refuse(update, arguments, group_id)

    def _move_all(
        self, update: str, arguments: Sequence[Any], group_ids: Sequence[int], named: object
    ) -> None:
        last = msgspec.json.encode(named).decode()
        with self._all_or_none():
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
        group = self.group(group_id)
        wanted = " ".join(update.partition("WHERE")[2].partition("RETURNING")[0].split())
        if group is None:
            msg = f"group {group_id} was never issued"
        else:
            msg = (
                f"group {group_id} is {group.state} at attempt {group.attempt} (step"
                f" {group.trained_step}), where the transition needs {wanted} with {arguments}"
            )
        raise LedgerError(msg)
