"""Real processes and the relays between them, which a test kills, stops, cuts and holds up."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from tests.helpers.mailbox_fault_actors import Orders
from tests.helpers.mailbox_fault_verdict import Verdict, judge
from tests.helpers.nodes import KEY

ROOT = Path(__file__).parents[2]
QUICK = {"heartbeat_s": 0.25, "suspect_s": 1.5, "dead_s": 4.0}


class Process:
    """One life of a process, and what it has said."""

    def __init__(self, orders: Orders, process: asyncio.subprocess.Process) -> None:
        self.orders = orders
        self.process = process
        self.events: list[list[str]] = []
        self._heard = asyncio.Event()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._errors())]
        self.stderr = b""

    async def _listen(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.events.append(line.decode().split())
            self._heard.set()

    async def _errors(self) -> None:
        assert self.process.stderr is not None
        self.stderr = await self.process.stderr.read()

    def order(self, *words: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((" ".join(words) + "\n").encode())

    async def until(self, condition: Callable[[list[list[str]]], Any]) -> Any:
        """Wait until what it has said meets a condition."""
        while not (found := condition(self.events)):
            self._heard.clear()
            await self._heard.wait()
        return found

    async def says(self, *words: str, since: int = 0) -> list[str]:
        """Wait for an event that begins with these words."""
        size = len(words)
        found: list[str] = await self.until(
            lambda events: next((e for e in events[since:] if e[:size] == list(words)), None)
        )
        return found

    async def watches(self, other: Orders) -> None:
        """Wait until it watches this life of another process."""
        watching = ["watching", other.name, f"{other.name}.{other.life}"]

        def last_word(events: list[list[str]]) -> bool:
            about = [e for e in events if e[:2] in (watching[:2], ["down", other.name])]
            return bool(about) and about[-1] == watching

        await self.until(last_word)

    async def end(self) -> int:
        status = await self.process.wait()
        await asyncio.gather(*self._tasks)
        return status


class Relay:
    """A TCP port that leads to a Unix socket, and can be cut, held up, and closed."""

    def __init__(self, back: Path) -> None:
        self._back = back
        self._server: asyncio.Server | None = None
        self._port = 0
        self._ends: set[asyncio.StreamWriter] = set()
        self._open = {direction: asyncio.Event() for direction in ("there", "back")}
        for gate in self._open.values():
            gate.set()

    async def admit(self) -> Relay:
        """Listen; at the same port as before."""
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
            self._port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def place(self) -> str:
        return f"tcp:127.0.0.1:{self._port}"

    def refuse(self) -> None:
        """Listen no more, as the host of a process does that has ended."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def cut(self) -> None:
        """Lose every connection, with what is in it."""
        for end in self._ends:
            end.transport.abort()

    @contextlib.contextmanager
    def held_up(self, direction: str) -> Any:
        """Let nothing through in one direction."""
        self._open[direction].clear()
        yield
        self._open[direction].set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._open_end(writer), contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_unix_connection(self._back)
            with self._open_end(far_writer):
                await asyncio.gather(
                    self._pump(reader, far_writer, "there"), self._pump(far_reader, writer, "back")
                )

    @contextlib.contextmanager
    def _open_end(self, end: asyncio.StreamWriter) -> Iterator[None]:
        self._ends.add(end)
        try:
            yield
        finally:  # also where the test ends first, and cancels this
            end.transport.abort()
            self._ends.discard(end)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: str
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 14):
                await self._open[direction].wait()
                sink.write(data)
                await sink.drain()
        sink.transport.abort()


class Stage:
    """Processes, the relays between them, and what was done to them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.living: dict[str, Process] = {}
        self.killed: set[tuple[str, int]] = set()
        self.told_s: list[float] = []
        self.relays: dict[tuple[str, str], Relay] = {}
        """by who dials whom"""

    async def relay(self, dialler: str, receiver: str) -> None:
        self.relays[dialler, receiver] = await Relay(self.directory / receiver).admit()

    async def start(self, name: str, *receivers: str, life: int = 1, **orders: Any) -> Process:
        places = {to: relay.place for (by, to), relay in self.relays.items() if by == name}
        spoken = {"key": KEY.hex(), "limits": QUICK, **orders}
        told = Orders(str(self.directory), name, life, receivers=receivers, places=places, **spoken)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.helpers.mailbox_fault_process",
            cwd=ROOT,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(told) + b"\n")
        self.living[name] = Process(told, process)
        await self.living[name].says("up")
        for (_, to), relay in self.relays.items():
            if to == name:
                await relay.admit()
        return self.living[name]

    def watchers(self, name: str) -> list[Process]:
        return [each for each in self.living.values() if name in each.orders.receivers]

    async def all_watch(self) -> None:
        """Wait until all who send to somebody watch the life that he has."""
        for name, process in self.living.items():
            for each in self.watchers(name):
                await each.watches(process.orders)

    async def kill(self, name: str) -> None:
        """kill -9; every watcher must be told in time."""
        process = self.living.pop(name)
        watchers = self.watchers(name)
        marks = [len(each.events) for each in watchers]
        for (_, to), relay in self.relays.items():
            if to == name:
                relay.refuse()
        begin = time.monotonic()
        process.process.kill()
        self.killed.add((name, process.orders.life))
        for each, mark in zip(watchers, marks, strict=True):
            _, _, at, *reason = await each.says("down", name, since=mark)
            assert reason[:3] == ["the", "process", "of"]
            self.told_s.append(float(at) - begin)
        await process.end()

    async def restart(self, name: str, orders: Orders) -> None:
        """Start the next life of a process that was killed."""
        again = {"per_turn": orders.per_turn, "jumps": orders.jumps, "limits": orders.limits}
        process = await self.start(name, *orders.receivers, life=orders.life + 1, **again)
        process.order("flow")

    async def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        process = self.living[name].process
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        process.send_signal(signal.SIGCONT)

    async def finish(self) -> Verdict:
        """Let all that was given arrive, end the processes, and judge."""
        await self.all_watch()
        for process in self.living.values():
            process.order("finish")
        for process in self.living.values():
            await process.says("finished")
        for process in self.living.values():
            process.order("quit")
        for process in self.living.values():
            assert await process.end() == 0, process.stderr
        return judge(self.directory, self.killed)


@asynccontextmanager
async def stage(directory: Path) -> AsyncIterator[Stage]:
    here = Stage(directory)
    try:
        yield here
    finally:
        for process in here.living.values():
            with contextlib.suppress(ProcessLookupError):
                process.process.kill()
            await process.end()
        for relay in here.relays.values():
            relay.refuse()
            relay.cut()
        await asyncio.sleep(0)


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(240):
            await scene()

    asyncio.run(timed())


def events(process: Process, *kinds: str) -> list[list[str]]:
    return [event for event in process.events if event[0] in kinds]
