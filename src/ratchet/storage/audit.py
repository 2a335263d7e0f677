"""What the files of a run prove about it, without its processes.

Consumes ledger.sqlite, versions.sqlite and the manifests of the checkpoints, read in this order, as
each may name only what the later ones had already; produces findings. Waits for nothing, and works
beside a running run, as what others are told is on disk first.

The invariants are those of the architecture: I1 terms and versions only move forward, I2 nothing is
trained past the staleness bound, I3 no group is lost and none trained twice, I5 the buffer keeps
its cap in groups. Its cap in bytes leaves no trace in the files.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ratchet.staleness import Lineage, Position, UnknownVersion
from ratchet.storage import groups, versions
from ratchet.storage.checkpoint import CheckpointFacts
from ratchet.storage.groups import STATES, GroupRow
from ratchet.storage.sqlite import open_reader, refusals
from ratchet.types import VersionRecord

_SHOWN: Final = 5
_NEXT: Final = {
    None: {"issued"},
    "issued": {"claimed", "requeued", "dropped"},
    "retried": {"claimed", "requeued", "dropped"},
    "claimed": {"finished", "retried", "dropped"},
    "finished": {"batched", "retried", "dropped"},
    "requeued": {"batched", "retried", "dropped"},
    "batched": {"trained", "retried", "dropped"},
    "trained": {"committed", "retried"},
    "committed": {"retried"},
    "dropped": set(),
}
"""Which event may follow which in the life of a group; "masked" changes nothing."""
_OPEN: Final = frozenset({"claimed", "finished", "requeued"})
_STATE_OF: Final = {"retried": "issued", "requeued": "finished"}


class Limits(NamedTuple):
    """What the configurations of a run allow; of several, the most."""

    max_staleness: int
    open_groups: int
    batch_groups: int
    mixture: bool = False
    """several tasks, each with epochs of its own"""


class Finding(msgspec.Struct, frozen=True):
    """One check."""

    invariant: str
    check: str
    """what holds, in words"""
    num_checked: int
    num_wrong: int
    wrong: tuple[str, ...]
    """the first of what does not hold"""


class _Files(NamedTuple):
    groups: Sequence[GroupRow]
    events: Sequence[tuple[int, str]]
    """(group, event), in the order in which they came about"""
    cursor: tuple[int, int]
    terms: Sequence[int]
    records: Sequence[VersionRecord]
    lineage: Lineage


def audit(
    ledger: Path, version_file: Path, checkpoints: Iterable[CheckpointFacts], limits: Limits
) -> tuple[Finding, ...]:
    """Check everything.

    Args:
        ledger: the file of the groups.
        version_file: the file of the versions.
        checkpoints: of the whole ones; read last.
        limits: of the run.

    Raises:
        UserError: if a file is missing, damaged, newer or of another kind.
    """
    files = _read(ledger, version_file)
    facts = tuple(checkpoints)
    records = {record.version: record for record in files.records}
    trained = [row for row in files.groups if row.state in {"trained", "committed"}]
    ids = [row.group_id for row in files.groups]
    found = [
        ("I1", "no term is missing", files.terms, _gaps(files.terms, 1)),
        ("I1", "no version is missing", files.records, _gaps(records, 0)),
        ("I1", "versions, terms and steps only grow", files.records, _forward(files, records)),
        ("I1", "checkpoints are of known versions", facts, _known_checkpoints(facts, records)),
        ("I2", "trained within max_staleness", trained, _stale(trained, files.lineage, limits)),
        ("I3", "no group is missing", ids, _gaps(ids, 0)),
        ("I3", "the cursor is where the issued prompts end", ids, _cursor(files, limits)),
        ("I3", "no prompt is issued twice in an epoch", ids, _twice(files.groups)),
        ("I3", "each group has one life, and is where it ended", ids, _lives(files)),
        ("I3", "no step trained more than a batch", trained, _batches(trained, limits)),
        ("I3", "a checkpoint has what is committed", trained, _committed(trained, facts, files)),
        ("I5", "never more open groups than there is room", files.events, _room(files, limits)),
    ]
    return tuple(_finding(*each) for each in found)


def _finding(name: str, check: str, checked: Sequence[object], wrong: Iterable[str]) -> Finding:
    problems = tuple(wrong)
    return Finding(name, check, len(checked), len(problems), problems[:_SHOWN])


def _read(ledger: Path, version_file: Path) -> _Files:
    with closing(open_reader(ledger, groups.SCHEMA)) as sql, refusals(ledger):
        sql.execute("BEGIN")  # all of one moment
        rows = [GroupRow(*row) for row in sql.execute("SELECT * FROM groups ORDER BY group_id")]
        events = sql.execute("SELECT group_id, event FROM events ORDER BY rowid").fetchall()
        cursor = sql.execute("SELECT epoch, position FROM cursor").fetchone() or (0, 0)
    with closing(open_reader(version_file, versions.SCHEMA)) as sql, refusals(version_file):
        sql.execute("BEGIN")
        terms = [row[0] for row in sql.execute("SELECT term FROM terms ORDER BY term")]
        records = _records(sql)
    lineage = Lineage()
    for record in records:
        try:
            lineage.add(record.version, record.step, record.parent)
        except ValueError:
            continue  # I1 names it
    return _Files(rows, events, cursor, terms, records, lineage)


def _records(sql: sqlite3.Connection) -> list[VersionRecord]:
    rows = sql.execute("SELECT * FROM versions ORDER BY version")
    return [VersionRecord(*row[:-1]) for row in rows]


def _gaps(numbers: Iterable[int], first: int) -> Iterator[str]:
    """Yield what is missing in ascending numbers."""
    expected = first
    for number in numbers:
        if number > expected:
            missing = f"{expected}" if number == expected + 1 else f"{expected} to {number - 1}"
            yield f"{missing} is missing before {number}"
        expected = number + 1


def _forward(files: _Files, records: dict[int, VersionRecord]) -> Iterator[str]:
    terms, term = set(files.terms), 0
    for record in files.records:
        name = f"version {record.version}"
        if record.term < term or record.term not in terms:
            yield f"{name} is of term {record.term}, after term {term} of {len(terms)}"
        term = max(term, record.term)
        if record.state == "live" and not record.digest:
            yield f"{name} is live without a digest"
        if record.parent is None:
            continue
        parent = records.get(record.parent)
        if parent is None or parent.version >= record.version:
            yield f"{name} has the parent {record.parent}, which is not before it"
        elif parent.step > record.step or parent.term > record.term:
            yield (
                f"{name} (term {record.term}, step {record.step}) goes back from its parent"
                f" {parent.version} (term {parent.term}, step {parent.step})"
            )


def _known_checkpoints(
    facts: Iterable[CheckpointFacts], records: dict[int, VersionRecord]
) -> Iterator[str]:
    for each in facts:
        record = records.get(each.version)
        if record is None or record.step > each.step or record.term > each.term:
            yield (
                f"the checkpoint of step {each.step}, term {each.term} has version {each.version},"
                f" which is {'unknown' if record is None else f'of step {record.step}'}"
            )


def _stale(rows: Iterable[GroupRow], lineage: Lineage, limits: Limits) -> Iterator[str]:
    for row in rows:
        name = f"group {row.group_id}"
        if row.trained_step is None or row.trained_version is None or row.staleness is None:
            yield f"{name} is {row.state} without its step, version or staleness"
            continue
        if row.staleness > limits.max_staleness:
            yield f"{name} was trained at staleness {row.staleness}, past {limits.max_staleness}"
        position = Position(row.trained_version, row.trained_step - 1)
        ends = {version for version in (row.min_version, row.max_version) if version is not None}
        try:
            distances = [lineage.staleness(version, position) for version in ends]
        except UnknownVersion as error:
            yield f"{name} was made or trained by a version that was never reserved: {error}"
        except ValueError as error:
            yield f"{name}: {error}"
        else:
            if row.reason is None and max(distances, default=0) > row.staleness:
                yield (
                    f"{name} has tokens {max(distances)} steps from step {row.trained_step}, where"
                    f" the ledger says {row.staleness}"
                )


def _cursor(files: _Files, limits: Limits) -> Iterator[str]:
    (epoch, position), num_issued = files.cursor, len(files.groups)
    before = num_issued - position  # in the epochs that are over
    num_prompts = len({row.prompt_id for row in files.groups})
    agrees = before == 0
    if epoch:
        agrees = before % epoch == 0 if limits.mixture else before == epoch * num_prompts
    if not agrees:
        yield (
            f"the cursor is at epoch {epoch}, prompt {position}, and {num_issued} groups of"
            f" {num_prompts} prompts were issued"
        )


def _twice(rows: Iterable[GroupRow]) -> Iterator[str]:
    counts = Counter((row.epoch, row.prompt_id) for row in rows)
    for (epoch, prompt), count in counts.items():
        if count > 1:
            yield f"prompt {prompt!r} has {count} groups in epoch {epoch}"


def _lives(files: _Files) -> Iterator[str]:
    last: dict[int, str] = {}
    retries: Counter[int] = Counter()
    for group_id, event in files.events:
        if event == "masked" and last.get(group_id) in {"finished", "requeued"}:
            continue
        before = last.get(group_id)
        if event not in _NEXT.get(before, ()):
            yield f"group {group_id} was {event} after it was {before}"
        last[group_id] = event
        retries[group_id] += event == "retried"
    for row in files.groups:
        ended = last.pop(row.group_id, None)
        state = None if ended is None else _STATE_OF.get(ended, ended)
        if state != row.state or row.state not in STATES:
            yield f"group {row.group_id} is {row.state}, and its life ends with {ended}"
        if row.attempt != retries[row.group_id]:
            yield (
                f"group {row.group_id} is at attempt {row.attempt}, and was issued again"
                f" {retries[row.group_id]} times"
            )
    for group_id in last:
        yield f"group {group_id} has a life and no row"


def _batches(rows: Iterable[GroupRow], limits: Limits) -> Iterator[str]:
    counts = Counter((row.trained_version, row.trained_step) for row in rows)
    for (version, step), count in counts.items():
        if count > limits.batch_groups:
            yield (
                f"step {step}, from version {version}, trained {count} groups of at most"
                f" {limits.batch_groups}"
            )


def _committed(
    rows: Iterable[GroupRow], facts: Iterable[CheckpointFacts], files: _Files
) -> Iterator[str]:
    contained: dict[int, int] = {}  # version -> the newest step of a checkpoint that follows it
    for each in facts:
        if not files.lineage.unknown((each.version,)):
            for version in files.lineage.path(each.version):
                contained[version] = max(each.step, contained.get(version, 0))
    for row in rows:
        step, took_it = row.trained_step or 0, row.trained_version
        newest = -1 if took_it is None else contained.get(took_it, -1)
        if row.state == "committed" and newest < step:
            yield f"group {row.group_id} of step {step}, version {took_it} is in no checkpoint"


def _room(files: _Files, limits: Limits) -> Iterator[str]:
    is_open: set[int] = set()
    most = 0
    for group_id, event in files.events:
        if event in _OPEN:
            is_open.add(group_id)
        elif event != "masked":
            is_open.discard(group_id)
        most = max(most, len(is_open))
    if most > limits.open_groups:
        yield f"{most} groups were open at once, where there is room for {limits.open_groups}"
