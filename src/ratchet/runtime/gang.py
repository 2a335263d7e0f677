"""How the ranks of a trainer on one node and the agent that started them talk: files of a private
directory.

Consumes the directory (mode 0700, made by the agent and removed by it); produces lines for a rank
and a rank's last words. Rank N of the node reads its `RoleSpec` and its commands from a FIFO, as a
role reads its launcher's pipe: what is secret is in no file, no argument and no environment. The
agent is the FIFO's only writer, so that its end of file is the agent's death, also after a kill -9;
and the kernel is asked to kill the rank then, for one that stands still reads nothing. Waits for
nothing: a rank that comes too late finds the end of file.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from ratchet.errors import ConfigError
from ratchet.runtime.role import RoleOutcome

FOLDER: Final = "RATCHET_RANKS"
"""Environment variable with the path of the directory."""
_PIPE_BYTES: Final = 2**20
_PR_SET_PDEATHSIG: Final = 1
_TERMINATED: Final = -15
"""Exit code of a rank that the agent ended because of another."""


class LastWords(msgspec.Struct, frozen=True):
    """How a rank ended, and when."""

    outcome: RoleOutcome
    at_s: float
    """monotonic clock of the machine"""


class Death(NamedTuple):
    """A rank that failed, as the agent saw it."""

    rank: int
    exit_code: int


class RankFiles:
    """The files of one rank."""

    def __init__(self, folder: Path, local_rank: int) -> None:
        self.folder = folder
        self._fifo = folder / f"{local_rank}.in"
        self._words = folder / f"{local_rank}.out"
        self._writer = -1

    # --- the agent's side

    def open(self) -> None:
        """Make the FIFO and hold its writing end, which no child inherits."""
        os.mkfifo(self._fifo, 0o600)
        self._writer = os.open(self._fifo, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        fcntl.fcntl(self._writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    def tell(self, line: bytes) -> None:
        """Write a line without waiting for the rank to read it.

        Raises:
            ConfigError: if the pipe does not hold it: a configuration of a mebibyte.
        """
        try:
            written = os.write(self._writer, line + b"\n")
        except BlockingIOError:
            written = 0
        if written <= len(line):
            msg = f"a rank cannot be told {len(line)} bytes: is the configuration that long?"
            raise ConfigError(msg)

    def last_words(self) -> LastWords | None:
        """Return what the rank said at its end, if it could."""
        with contextlib.suppress(FileNotFoundError):
            return msgspec.json.decode(self._words.read_bytes(), type=LastWords)
        return None

    # --- the rank's side

    def become_stdin(self) -> None:
        """Put the FIFO in the place of standard input, and end this process with the agent.

        Raises:
            FileNotFoundError: if the agent is gone.
        """
        reader = os.open(self._fifo, os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(reader, True)
        os.dup2(reader, 0)
        os.close(reader)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        threading.Thread(target=self._end_with_agent, daemon=True, name="agent").start()

    def say(self, outcome: RoleOutcome) -> None:
        """Leave the last words, whole or not at all."""
        temporary = self._words.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(LastWords(outcome, time.monotonic())))
        temporary.replace(self._words)

    def _end_with_agent(self) -> None:
        poll = select.poll()
        poll.register(0, 0)  # the end of the last writer, and not what is to be read
        poll.poll()
        os._exit(1)


def first_cause(
    deaths: Sequence[Death], words: Mapping[int, LastWords], err_file: str
) -> RoleOutcome:
    """Return the outcome of the whole from the ranks that failed: what happened first.

    A rank that was killed could say nothing, and whoever else failed then failed for want of it.
    Of the others the earliest last words count. A rank that left without a word, though nobody
    killed it, was told to go and did not come to its end in time.

    Args:
        deaths: the ranks that failed, at least one.
        words: last words by rank.
        err_file: where their standard errors are.
    """
    silent = [death for death in deaths if death.rank not in words]
    killed = [d for d in silent if d.exit_code < 0 and d.exit_code != _TERMINATED]
    spoken = [d.rank for d in deaths if d.rank in words and not _orderly(words[d.rank])]
    if spoken and not killed:
        rank = min(spoken, key=lambda rank: words[rank].at_s)
        outcome = words[rank].outcome
        if rank == 0:
            return outcome
        return RoleOutcome(outcome.status, f"rank {rank} of the trainer: {outcome.detail}")
    first = next(iter(killed or silent or deaths))
    code = first.exit_code
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return RoleOutcome("failed", f"rank {first.rank} of the trainer died of {how}; see {err_file}")


def _orderly(words: LastWords) -> bool:
    return words.outcome.status in {"stopped", "finished"}
