"""What finished groups consist of, on disk until a checkpoint contains their step: payloads/.

Consumes groups and what is to be forgotten, on the event loop, without waiting; produces one file
a group, written on a thread of its own, and the groups again. Waits for the disk in `get` and
`close` only.

A payload saves work and nothing depends on it: what is missing, torn or of another attempt is
generated again. So nothing is synced (a kill -9 leaves what was written, a power cut perhaps not,
which the checksum tells), the ledger never waits for a file here, and a disk that is full or too
slow costs no group. Files, and not a table: SQLite writes 10 MB twice and takes ten times as long.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ratchet.types import Rollout, RolloutGroup

_SUFFIX: Final = ".payload"
_NEW: Final = ".new"
_LENGTH: Final = 4
_MAX_PENDING: Final = 256 * 2**20
"""Bytes that wait to be written; groups beyond them are not kept."""


def _split(data: memoryview) -> Iterator[memoryview]:
    start = 0
    while start < len(data):
        begin = start + _LENGTH
        start = begin + int.from_bytes(data[start:begin], "big")
        yield data[begin:start]


class _Change(NamedTuple):
    group: RolloutGroup | None
    """None: what is kept is removed"""
    num_bytes: int


_REMOVE: Final = _Change(None, 0)


class Payloads:
    """The payloads of one buffer; there is one writer.

    Args:
        directory: made with the first payload.

    Raises:
        OSError: if what is there cannot be listed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._is_made = directory.is_dir()
        self.kept: set[int] = set()
        """Ids of the groups whose payload is here, or on its way."""
        self.num_failed = 0
        """Payloads that were not kept, as the disk was full or too slow."""
        self.error = ""
        """What was wrong with the last one; empty after one that was kept."""
        self._pending: dict[int, _Change] = {}
        self._pending_bytes = 0
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="payloads")
        self._encoder = msgspec.msgpack.Encoder()
        for path in directory.iterdir() if directory.is_dir() else ():
            if path.suffix == _SUFFIX and path.stem.isdecimal():
                self.kept.add(int(path.stem))
            elif path.suffix == _NEW:
                path.unlink(missing_ok=True)

    def put(self, group: RolloutGroup, num_bytes: int) -> None:
        """Keep a group of about so many bytes, in the place of an earlier attempt of it."""
        if self._pending_bytes > _MAX_PENDING:
            self.forget([group.group_id])
            self._failed(f"{self._pending_bytes} bytes wait for the disk")
            return
        self._later(group.group_id, _Change(group, num_bytes))

    def forget(self, group_ids: Iterable[int]) -> None:
        """Remove what is kept of these groups."""
        for group_id in self.kept.intersection(group_ids):
            self.kept.discard(group_id)
            self._later(group_id, _REMOVE)

    def get(self, group_id: int, attempt: int) -> RolloutGroup | None:
        """Return a group as it was kept; None if it is not, or not of this attempt."""
        if group_id not in self.kept:
            return None
        with self._lock:
            pending = self._pending.get(group_id)
        group = self._read(group_id) if pending is None else pending.group
        return group if group is not None and group.attempt == attempt else None

    def close(self) -> None:
        """Write what is pending."""
        self._executor.shutdown()

    def _path(self, group_id: int) -> Path:
        return self._directory / f"{group_id}{_SUFFIX}"

    def _later(self, group_id: int, change: _Change) -> None:
        with self._lock:
            before = self._pending.get(group_id, _REMOVE)
            self._pending[group_id] = change
            if change.group is not None:  # here, as an earlier write of it may fail just now
                self.kept.add(group_id)
            self._pending_bytes += change.num_bytes - before.num_bytes
        self._executor.submit(self._work, group_id)

    def _work(self, group_id: int) -> None:
        with self._lock:
            if group_id not in self._pending:  # done already, with what was to be done before
                return
            change = self._pending[group_id]
        is_lost = False
        try:
            if change.group is None:
                self._path(group_id).unlink(missing_ok=True)
            else:
                self._write(change.group)
                self.error = ""
        except OSError as error:
            is_lost = True
            self._failed(str(error))
        with self._lock:
            if self._pending[group_id] is change:  # else there is a later one
                if is_lost:
                    self.kept.discard(group_id)
                del self._pending[group_id]
                self._pending_bytes -= change.num_bytes

    def _write(self, group: RolloutGroup) -> None:
        path = self._path(group.group_id)
        new = path.with_suffix(_NEW)
        if not self._is_made:
            self._directory.mkdir(exist_ok=True)
            self._is_made = True
        try:
            with new.open("wb") as file:  # buffered: a raw write may stop half way on a full disk
                for part in self._parts(group):
                    file.write(part)
            new.rename(path)
        except OSError:
            new.unlink(missing_ok=True)
            path.unlink(missing_ok=True)  # of an earlier attempt
            raise

    def _parts(self, group: RolloutGroup) -> Iterator[bytes]:
        """Yield lengths and contents, and the checksum of all of them. A rollout is encoded for
        itself, as the event loop has to wait for as long as that takes.
        """
        checksum = 0
        for each in (msgspec.structs.replace(group, rollouts=()), *group.rollouts):
            content = self._encoder.encode(each)
            for part in (len(content).to_bytes(_LENGTH, "big"), content):
                checksum = zlib.crc32(part, checksum)
                yield part
        yield checksum.to_bytes(_LENGTH, "big")

    def _read(self, group_id: int) -> RolloutGroup | None:
        try:
            data = memoryview(self._path(group_id).read_bytes())
            end = len(data) - _LENGTH
            if end < 0 or zlib.crc32(data[:end]) != int.from_bytes(data[end:], "big"):
                return None
            head, *rollouts = _split(data[:end])
            group = msgspec.msgpack.decode(head, type=RolloutGroup)
            found = tuple(msgspec.msgpack.decode(part, type=Rollout) for part in rollouts)
        except (OSError, ValueError, msgspec.DecodeError):
            return None
        return msgspec.structs.replace(group, rollouts=found)

    def _failed(self, error: str) -> None:
        self.num_failed += 1
        self.error = error
