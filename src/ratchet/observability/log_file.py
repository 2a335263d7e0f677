"""The file that a process logs to.

Consumes encoded lines, each a JSON object with a timestamp, a role and a pid; waits for the
operating system to take them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from ratchet.errors import UserError


class LogFile:
    """Appends each line to the file with one write.

    A line that cannot be written harms nobody who logs: it is counted, and the next one that can be
    written says so before. The descriptor closes with the last log that writes to it, never under
    one.
    """

    def __init__(self, path: Path | None) -> None:
        """Open it; None for standard error.

        Raises:
            UserError: if it cannot be opened.
        """
        self._num_lost = 0
        self._is_torn = False
        """the last line has no end"""
        if path is None:
            self._fd = os.dup(2)
            return
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            msg = f"cannot open the log file {path}: {error.strerror}; check the directory"
            raise UserError(msg) from error

    def write(self, line: bytes) -> None:
        """Append a line."""
        try:
            if self._num_lost:
                self._append(_lost(line, self._num_lost))
                self._num_lost = 0
            self._append(line)
        except OSError:
            self._num_lost += 1

    def _append(self, line: bytes) -> None:
        """Append a line; a short write, of a disk that is full, ends it by hand."""
        if self._is_torn:
            line = b"\n" + line
        written = 0
        try:
            while written < len(line):
                written += os.write(self._fd, line[written:])
        finally:
            if written:
                self._is_torn = written < len(line)

    debug = info = warning = error = critical = write

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


def _lost(line: bytes, num_lines: int) -> bytes:
    """Return a line for those that were lost before this one, in its time and its role's name."""
    fields = msgspec.json.decode(line, type=dict[str, Any])
    said = {"level": "error", "event": "log_lines_lost", "num_lines": num_lines}
    kept = {name: fields[name] for name in ("role", "pid")}
    return msgspec.json.encode({"timestamp": fields["timestamp"], **said, **kept}) + b"\n"
