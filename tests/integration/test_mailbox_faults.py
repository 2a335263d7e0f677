"""Real processes that are killed, stopped and cut off while numbered messages flow between them.

What the processes did is in files of their own, which a kill does not take with it; the verdict is
made of these afterwards. See `tests/helpers/mailbox_fault_process.py` for who writes what.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.mailbox_fault_process import Orders
from tests.helpers.nodes import KEY

from ratchet.transport.mailbox.frames import PROTOCOL

ROOT = Path(__file__).parents[2]
QUICK = {"heartbeat_s": 0.25, "suspect_s": 1.5, "dead_s": 4.0}
TOLD_S = 1.0
Flow = tuple[str, int, str, str]
"""sender, its life, receiver, lane"""


# --- what happened


@dataclass
class Verdict:
    """What became of every message, and what should not have."""

    given: int = 0
    heard: int = 0
    acknowledged: int = 0
    dead: int = 0
    both: int = 0
    """dead letters that were heard all the same: not known to be delivered"""
    with_the_killed: int = 0
    """given by a process that was killed before it could send them, or learn that they were lost"""
    problems: list[str] = field(default_factory=list)


def lines(directory: Path, kind: str) -> dict[tuple[str, int], list[list[str]]]:
    """What was noted, by process and life."""
    found = {}
    for path in directory.glob(f"*.{kind}"):
        name, life, _ = path.name.split(".")
        found[name, int(life)] = [line.split() for line in path.read_text().splitlines()]
    return found


def by_flow(directory: Path, kind: str) -> dict[Flow, set[int]]:
    """What senders noted."""
    found: dict[Flow, set[int]] = defaultdict(set)
    for (sender, life), noted in lines(directory, kind).items():
        for receiver, lane, number in noted:
            found[sender, life, receiver, lane].add(int(number))
    return found


def judge(directory: Path, killed: set[tuple[str, int]]) -> Verdict:
    """Account for every message that was given."""
    verdict = Verdict()
    given, acked, dead = (by_flow(directory, kind) for kind in ("gave", "acked", "dead"))
    heard: dict[Flow, set[int]] = defaultdict(set)
    for (receiver, its_life), noted in lines(directory, "heard").items():
        in_turn: dict[Flow, list[int]] = defaultdict(list)
        for sender, life, lane, number in noted:
            in_turn[sender, int(life), receiver, lane].append(int(number))
        for flow, numbers in in_turn.items():
            where = f"{flow} in life {its_life}"
            if len(set(numbers)) < len(numbers) or heard[flow] & set(numbers):
                verdict.problems.append(f"doubled: {where}")
            if numbers != sorted(numbers):
                verdict.problems.append(f"out of order: {where}")
            gap = set(range(min(numbers), max(numbers))) - set(numbers) - dead[flow]
            if gap:
                verdict.problems.append(f"a gap: {where}: {sorted(gap)[:5]}")
            heard[flow] |= set(numbers)
    for flow in given | heard | acked | dead:
        left = given[flow] - heard[flow] - dead[flow]
        if acked[flow] - heard[flow]:
            verdict.problems.append(f"acknowledged and lost: {flow}")
        if (heard[flow] | acked[flow] | dead[flow]) - given[flow]:
            verdict.problems.append(f"never given: {flow}")
        if left and flow[:2] not in killed:
            verdict.problems.append(f"lost without a word: {flow}: {sorted(left)[:5]}")
        verdict.with_the_killed += len(left)
        verdict.both += len(heard[flow] & dead[flow])
    verdict.given, verdict.heard, verdict.acknowledged, verdict.dead = (
        sum(map(len, each.values())) for each in (given, heard, acked, dead)
    )
    return verdict


# --- who acts


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


# --- the tests

NUM_KILLS = 22
NUM_MESSAGES = 20_000


@pytest.mark.slow
@pytest.mark.timeout(250)  # 20 s on an idle machine
def test_kills_stops_and_cuts_lose_double_and_reorder_nothing(tmp_path: Path) -> None:
    """Four processes, each sends to two and hears from two; two links are direct, two relayed."""
    rng = random.Random(0)
    names = ("s1", "s2", "r1", "r2")
    relayed = [("s1", "r2"), ("s2", "r1")]

    async def trouble(here: Stage) -> None:
        """Something that is not a death; some of it looks like one."""
        link = rng.choice(relayed)
        both = [here.relays[link], here.relays[link[::-1]]]
        match rng.randrange(5):
            case 0:
                for relay in both:
                    relay.cut()
            case 1:
                with both[0].held_up(rng.choice(("there", "back"))):
                    await asyncio.sleep(0.2)
            case 2:  # looks like the end of both
                for relay in both:
                    relay.refuse()
                    relay.cut()
                await asyncio.sleep(0.1)
                for relay in both:
                    await relay.admit()
            case 3 | 4:
                await here.pause(rng.choice(sorted(here.living)), rng.uniform(0.05, 0.6))

    async def scene() -> None:
        async with stage(tmp_path) as here:
            for one, other in relayed:
                await here.relay(one, other)
                await here.relay(other, one)
            others = {"s": ("r1", "r2"), "r": ("s1", "s2")}
            for name in names:
                await here.start(name, *others[name[0]], per_turn=5)
            for process in here.living.values():
                process.order("flow")
            for turn in range(NUM_KILLS):
                await here.all_watch()
                await trouble(here)
                await here.all_watch()
                name = names[turn % 4] if turn < 8 else rng.choice(names)
                orders = here.living[name].orders
                await here.kill(name)
                await here.restart(name, orders)
            verdict = await here.finish()
            print(verdict, "told within", max(here.told_s))  # noqa: T201 - for pytest -s
            assert not verdict.problems
            assert verdict.given >= NUM_MESSAGES
            assert len(here.killed) == NUM_KILLS
            assert len(here.told_s) == 2 * NUM_KILLS
            assert max(here.told_s) < TOLD_S

    play(scene)


@pytest.mark.soak
def test_a_process_stopped_for_20_s_is_suspected_then_dead_then_back(tmp_path: Path) -> None:
    """At the default times: suspected after 5 s, dead after 15 s."""
    limits = {"suspect_s": 5.0, "dead_s": 15.0}

    async def scene() -> None:
        async with stage(tmp_path) as here:
            one = await here.start("one", "two", limits=limits, per_turn=1, turn_s=0.02)
            two = await here.start("two", "one", limits=limits, per_turn=1, turn_s=0.02)
            await here.all_watch()
            for process in (one, two):
                process.order("flow")
            begin = time.monotonic()
            stopped = asyncio.create_task(here.pause("two", 20.0))
            _, _, at = await one.says("peer_silent", "two")
            assert 4.0 < float(at) - begin < 7.5
            _, _, at, *reason = await one.says("down", "two")
            assert 14.0 < float(at) - begin < 17.5
            assert reason == ["two", "was", "silent", "for", "15", "s"]
            await stopped
            await here.all_watch()
            assert len(events(one, "down")) == 1
            assert not events(two, "peer_silent")  # it was not the other that stood still
            verdict = await here.finish()
            assert not verdict.problems
            assert verdict.given > 500

    play(scene)


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as here:
            await here.relay("one", "two")
            await here.relay("two", "one")
            one = await here.start("one", "two", jumps=True)
            two = await here.start("two", "one", jumps=True)
            await here.all_watch()
            for process in (one, two):
                process.order("flow")
            await here.pause("two", 0.5)
            for relay in here.relays.values():
                relay.cut()
            await here.all_watch()
            await asyncio.sleep(0.5)
            assert not events(one, "down", "peer_silent")
            assert not events(two, "down", "peer_silent")
            await here.kill("two")
            await here.restart("two", two.orders)
            verdict = await here.finish()
            assert not verdict.problems
            assert verdict.heard > 200
            assert max(here.told_s) < TOLD_S

    play(scene)


def test_a_wrong_key_fails_the_asks_of_both_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as here:
            one = await here.start("one")
            two = await here.start("two", key=bytes(range(1, 33)).hex())
            for process, other in ((one, "two"), (two, "one")):
                process.order("ask", other)
                said = await process.says("failed")
                assert said[1] == "AuthFailed"
                assert "do not hold the same key" in " ".join(said)

    play(scene)


def test_a_wrong_protocol_version_names_both_on_both_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as here:
            one = await here.start("one")
            two = await here.start("two", protocol=7)
            one.order("ask", "two")
            said = " ".join(await one.says("failed"))
            assert "AuthFailed" in said
            two.order("quit")
            await two.end()
            assert b"auth_failed" in two.stderr
            for text in (said, two.stderr.decode()):
                assert f"link protocol {PROTOCOL}" in text
                assert "speaks 7" in text

    play(scene)


def test_the_verdict_finds_planted_faults(tmp_path: Path) -> None:
    planted = {
        "double": "doubled: ",
        "lose": "lost without a word: ",
        "shuffle": "out of order: ",
        "boast": "acknowledged and lost: ",
    }

    async def scene() -> None:
        async with stage(tmp_path) as here:
            await asyncio.gather(*(here.start(fault, fault=fault) for fault in planted))
            one = await here.start("one", *planted, per_turn=20)
            one.order("flow")
            await asyncio.sleep(1.0)
            problems = judge(tmp_path, set()).problems
            for fault, found in planted.items():
                assert any(each.startswith(f"{found}('one', 1, {fault!r}") for each in problems)

    play(scene)


def test_a_death_that_is_told_late_is_found(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as here:
            await here.start("two")
            await here.start("one", "two", fault="dawdle")
            await here.all_watch()
            await here.kill("two")
            assert max(here.told_s) > TOLD_S

    play(scene)
