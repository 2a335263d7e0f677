"""How a keeper, a small program that stands between a worker and what it has started, leaves
nothing behind.

Consumes process numbers, produces their end; waits for that, but not for ever. Linux only. Only the
standard library is imported: a keeper starts in no time, and forks before there is a thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_END_S: Final = 5.0
"""A process that SIGKILL does not end hangs in the kernel: it is left to init."""


def become_subreaper() -> None:
    """Make this process the parent of every descendant whose own parent has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends; no child inherits
    that.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def children(pid: int) -> set[int]:
    """Return the children of a process, those that have ended and are not reaped included."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended
            found.update(map(int, (task / "children").read_bytes().split()))
    return found


def end_all(group: int) -> None:
    """Kill a process group, then kill and reap until this process, a subreaper, has no child: those
    of a killed one come to it.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    until = time.monotonic() + _END_S
    while time.monotonic() < until:
        for pid in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.001)
        except ChildProcessError:
            return


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
