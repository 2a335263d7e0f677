"""A program of its own that kills what a launcher leaves behind: `python reaper.py`.

Consumes lines on standard input, "+N" when the launcher has started the process group N and "-N"
when that is gone; produces nothing. Waits for the end of its input, which is the launcher's end
however it came, kill -9 included, and then kills the groups that are left: the roles, one that is
stopped or stuck too, and what they have started. Only the standard library is imported, and no
signal but SIGKILL ends it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Wait for the launcher's end, then kill."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        change = groups.add if line.startswith(b"+") else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
