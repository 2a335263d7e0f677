"""The parent of one reward process: `python -m ratchet.runtime.reward_keeper FD`.

Consumes the file descriptor of the wire, on which it says nothing; produces the reward process, a
fork of itself before anything but the standard library is imported. Waits for the end of that
process, or of the rollout worker, which closes its end of the wire however it goes, kill -9
included. Then it kills whatever the reward has started, and ends; its exit code is that of the
reward process (128 + the number of the signal that killed it).

The user's code never runs here, so nothing holds the keeper up. It is a subreaper: a process that
has left its session and lost its parent becomes a child of the keeper, and is found. The other end
of the wire sees the end of file only when all of them are gone.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from pathlib import Path
from typing import Final

from ratchet.subreaper import become_subreaper, die_with_parent, end_all

_IGNORED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command_line(pid: int) -> bytes:
    """Return what a process was started as; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def main() -> None:
    """Fork the reward process, wait, and clear up."""
    wire = int(sys.argv[1])
    os.set_inheritable(wire, False)
    become_subreaper()
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    keeper = os.getpid()
    scorer = os.fork()
    if scorer == 0:
        signal.set_wakeup_fd(-1)
        os.close(wake)
        os.close(woken)
        _become_scorer(keeper, wire)
    code = _wait(wire, woken, scorer)
    end_all(scorer)
    os._exit(code)


def _become_scorer(keeper: int, wire: int) -> None:
    os.setsid()  # a signal to its own group does not reach the keeper
    die_with_parent()
    if os.getppid() != keeper:
        os._exit(1)
    for number in (*_IGNORED, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    from ratchet.runtime.reward_process import serve

    serve(wire, keeper)


def _wait(wire: int, woken: int, scorer: int) -> int:
    """Reap orphans until the reward process ends, or the worker is gone."""
    poll = select.poll()
    poll.register(wire, select.POLLRDHUP)
    poll.register(woken, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == wire:
                return 0
        with contextlib.suppress(BlockingIOError):
            os.read(woken, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if ended[0] == scorer:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    main()
