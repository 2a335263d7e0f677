"""One role as a child process of the launcher.

Consumes the role's spec and commands; produces the process, and its last words when it has ended.
Waits for nothing but that end, which the kernel tells through a file descriptor of the process
(pidfd): no thread, no SIGCHLD handler, no polling. What a role has started itself does not outlive
it: each role leads a process group, and the rest of that is killed when the role has ended, while
its zombie still keeps the number of the group from being given to anyone else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ratchet.actors.restarts import End
from ratchet.observability.logs import Log
from ratchet.runtime.exits import when_exited
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.tree import role_end

_KILL_S: Final = 1.0
"""Seconds after SIGKILL in which a process is gone, unless it hangs in the kernel."""

_REAPER: Final = Path(__file__).with_name("reaper.py")
_READ_BYTES: Final = 65536


class Reaper:
    """The process that kills the roles if this one is killed; see `ratchet.runtime.reaper`."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, before any role."""
        self._process = subprocess.Popen(  # noqa: S603 - our own file
            [sys.executable, "-I", "-S", str(_REAPER)],  # 15 ms: neither site nor this package
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """A process group was started."""
        self._write(b"+%d\n" % group)

    def remove(self, group: int) -> None:
        """A process group is gone."""
        self._write(b"-%d\n" % group)

    def _write(self, line: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(line)
        except BrokenPipeError:  # each role still ends by itself when its launcher does
            self._log.warning("reaper_lost")
            self._process.stdin.close()
            self._process.stdin = None

    async def close(self) -> None:
        """End it; nothing is left to kill."""
        process, self._process = self._process, None
        if process is None:
            return
        gone = asyncio.Event()
        when_exited(process.pid, gone.set)
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_KILL_S):
                await gone.wait()
        except TimeoutError:
            process.kill()
        process.wait()


class RoleProcess:
    """Implements `Child`.

    Args:
        name: of the role.
        command: what to run: argv.
        env: its environment.
        first_lines: makes what each life reads first: its spec, and what it was told before.
        errors: file that its standard error is added to.
        reaper: kills its process group if the launcher is gone.
        log: of the launcher.
    """

    def __init__(
        self,
        name: str,
        *,
        command: Sequence[str],
        env: Mapping[str, str],
        first_lines: Callable[[], Iterable[bytes]],
        errors: Path,
        reaper: Reaper,
        log: Log,
    ) -> None:
        self.name = name
        self._command = list(command)
        self._env = dict(env)
        self._first_lines = first_lines
        self._errors = errors
        self._reaper = reaper
        self._log = log
        self._life: _Life | None = None

    async def start(self) -> None:
        """Start the process.

        Raises:
            OSError: there is no process to be had.
        """
        process = self._spawn()
        self._life = _Life(process, self._reaper)
        self._log.info("process_started", name=self.name, pid=process.pid)
        for line in self._first_lines():
            self.tell(line)

    def _spawn(self) -> subprocess.Popen[bytes]:
        with self._errors.open("ab") as errors:
            return subprocess.Popen(  # noqa: S603 - our own module
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the launcher: it stops the roles in order
                env=self._env,
            )

    def tell(self, line: bytes) -> None:
        """Write a line to its standard input; lost if it has ended."""
        if self._life is not None:
            self._life.write(line + b"\n")

    async def ended(self) -> End:
        """Wait for the process to exit."""
        if self._life is None:
            raise RuntimeError(f"{self.name} was not started")
        code, text = await asyncio.shield(self._life.exit)
        self._log.info("process_ended", name=self.name, code=code)
        return role_end(self.name, self._last_words(code, text))

    async def stop(self) -> None:
        """Send SIGTERM and wait."""
        if self._life is not None:
            self._life.terminate()
            await asyncio.wait([self._life.exit])

    async def kill(self) -> None:
        """Send SIGKILL to it and to all that it has started."""
        if self._life is None or self._life.exit.done():
            return
        self._life.kill_group()
        await asyncio.wait([self._life.exit], timeout=_KILL_S)
        if not self._life.exit.done():
            self._log.error("process_not_gone", name=self.name)

    def _last_words(self, code: int, text: bytes) -> RoleOutcome:
        with contextlib.suppress(msgspec.DecodeError):
            return msgspec.json.decode(text, type=RoleOutcome)
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return RoleOutcome("failed", f"{self.name} died of {how}; see {self._errors}")


class _Life:
    """One process, from its start until it is reaped."""

    def __init__(self, process: subprocess.Popen[bytes], reaper: Reaper) -> None:
        assert process.stdin is not None  # noqa: S101 - both are pipes
        assert process.stdout is not None  # noqa: S101
        self._loop = asyncio.get_running_loop()
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._reaper = reaper
        self._text = bytearray()
        self.exit: asyncio.Future[tuple[int, bytes]] = self._loop.create_future()
        """exit code, or minus the signal; and what it wrote to its standard output"""
        reaper.add(process.pid)
        os.set_blocking(self._stdout.fileno(), False)
        self._loop.add_reader(self._stdout.fileno(), self._read)
        when_exited(process.pid, self._exited)

    def write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):  # gone, or closed: its end is told
            self._stdin.write(data)

    def terminate(self) -> None:
        # not Popen.terminate: that may reap, and the number of the group would be free too early
        if not self.exit.done():
            os.kill(self._process.pid, signal.SIGTERM)

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> bool:
        """Take what is there; whether there may be more."""
        data = self._stdout.read(_READ_BYTES)
        if data == b"":
            self._loop.remove_reader(self._stdout.fileno())
        self._text += data or b""
        return bool(data)

    def _exited(self) -> None:
        self.kill_group()
        # not to the end of the pipe: somebody who left the group may hold it open
        while self._read():
            pass
        self._loop.remove_reader(self._stdout.fileno())
        self._stdin.close()
        self._stdout.close()
        self._reaper.remove(self._process.pid)
        self.exit.set_result((self._process.wait(), bytes(self._text)))
