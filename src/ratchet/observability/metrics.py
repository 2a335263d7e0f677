"""Step metrics: metrics.jsonl, one flushed line a step.

`MetricsWriter` consumes the numbers of a step from its one writer, the trainer; `read_metrics` and
`follow_metrics` produce them again for views, reports and scripts. Following waits for the next
line, looks for it each 100 ms, and ends when its caller says that no more will come. Fields: see
`ratchet.actors.step_metrics`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import msgspec

from ratchet.errors import UserError

POLL_S: Final = 0.1

Metrics = dict[str, Any]


class MetricsWriter:
    """Appends one line a step. NaN and infinity, which JSON does not have, become null.

    A line left unfinished by a crash is cut off first.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._encoder = msgspec.json.Encoder()
        _cut_unfinished_line(path)

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append a line; it is with the operating system when this returns.

        Raises:
            OSError: if it cannot be written; nothing of it stays.
        """
        line = self._encoder.encode(dict(metrics)) + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        written = 0
        try:
            while written < len(line):  # a disk that is full takes a part of it first
                written += self._file.write(line[written:])
        except OSError:
            os.ftruncate(self._file.fileno(), size)
            raise

    def close(self) -> None:
        """Close the file; closing again does nothing."""
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()


def _cut_unfinished_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def read_metrics(path: Path) -> list[Metrics]:
    """Return every finished line; none if the file does not exist yet.

    Raises:
        UserError: if a finished line is not a JSON object.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last newline is unfinished
    return [_decode(path, number, line) for number, line in enumerate(lines, start=1)]


def cut_metrics(path: Path, step: int) -> None:
    """Leave the lines up to a step; the others are added to NAME.lost.jsonl first.

    The file is replaced by another, so that whoever still appends to it spoils nothing.

    Raises:
        UserError: if a finished line is not a JSON object.
    """
    steps = [line["step"] for line in read_metrics(path)]
    if all(each <= step for each in steps):
        return
    lines = list(zip(steps, path.read_bytes().split(b"\n"), strict=False))
    with path.with_name(f"{path.stem}.lost.jsonl").open("ab") as file:
        file.writelines(line + b"\n" for each, line in lines if each > step)
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(b"".join(line + b"\n" for each, line in lines if each <= step))
    temporary.rename(path)


def follow_metrics(
    path: Path, *, until: Callable[[], bool], poll_s: float = POLL_S
) -> Iterator[Metrics]:
    """Yield every line from the first, then each new one as it comes; blocks in between.

    Args:
        path: the file; it need not exist yet.
        until: tells that no more lines will be written; what is there by then is still yielded.
        poll_s: seconds between two looks.

    Raises:
        UserError: if a finished line is not a JSON object.
    """
    reader = MetricsReader(path)
    while True:
        ended = until()  # asked before reading, so that nothing written before it is missed
        yield from reader.new()
        if ended:
            return
        time.sleep(poll_s)


class MetricsReader:
    """Reads a growing file piece by piece, for whoever has a loop of its own.

    Where a file was replaced by one with fewer lines (`cut_metrics`), new lines are those behind
    the ones that both begin with.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._offset = 0
        self._seen: list[int] = []  # a hash of each line

    def new(self) -> list[Metrics]:
        """Return the lines finished since the last call.

        Raises:
            UserError: if one is not a JSON object.
        """
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            was_replaced = self._file not in {None, number}
            self._file = number
            file.seek(0 if was_replaced else self._offset)
            lines = file.read().split(b"\n")[:-1]
        if was_replaced:
            lines = self._go_back(lines)
        found = []
        for line in lines:
            self._offset += len(line) + 1
            self._seen.append(hash(line))
            found.append(_decode(self._path, len(self._seen), line))
        return found

    def _go_back(self, lines: list[bytes]) -> list[bytes]:
        """Go to the end of what was read before; return the lines behind it."""
        pairs = zip(lines, self._seen, strict=False)
        num_known = sum(1 for _ in takewhile(lambda pair: hash(pair[0]) == pair[1], pairs))
        self._offset = sum(len(line) + 1 for line in lines[:num_known])
        del self._seen[num_known:]
        return lines[num_known:]


def _decode(path: Path, number: int, line: bytes) -> Metrics:
    try:
        return msgspec.json.decode(line, type=Metrics)
    except msgspec.DecodeError as error:
        msg = f"{path}, line {number}: {error}; the file is damaged, or is not a metrics file"
        raise UserError(msg) from error
