"""Mailboxes between real processes, over a Unix socket: kills, cuts, stops, and a wrong key."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.mailbox_process import make_node
from tests.helpers.nodes import KEY, Inbox, Letters

from ratchet.errors import ActorDead, AuthFailed
from ratchet.messages import AbortLoad, BurnVersion, Down, VersionBurnt
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.base import Ref
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.node import Node

ROOT = Path(__file__).parents[2]


class HeardLog(RecordingLog):
    """A log that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._changed = asyncio.Event()

    def _note(self, level: str, event: str, fields: dict[str, Any]) -> None:
        super()._note(level, event, fields)
        self._changed.set()

    async def has(self, event: str) -> None:
        while not self.named(event):
            self._changed.clear()
            await self._changed.wait()


class Stage:
    """This process's node, "main", and the processes that it starts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.inbox = Inbox("main")
        self.letters = Letters()
        self.log = HeardLog()
        self.node: Node
        self.processes: list[subprocess.Popen[bytes]] = []
        self._lives = itertools.count(1)

    async def start(self, name: str, key: bytes = KEY) -> subprocess.Popen[bytes]:
        process = self._spawn(name, key)
        assert process.stdout is not None
        assert await asyncio.to_thread(process.stdout.readline) == b"up\n"
        return process

    def _spawn(self, name: str, key: bytes) -> subprocess.Popen[bytes]:
        life = f"life{next(self._lives)}"
        module = "tests.helpers.mailbox_process"
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(self.directory), name, life],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        assert process.stdin is not None
        process.stdin.write(key.hex().encode() + b"\n")
        process.stdin.flush()
        return process

    def received(self, name: str, life: int) -> list[int]:
        text = (self.directory / f"{name}.life{life}.log").read_text()
        return [int(line) for line in text.split()]


@asynccontextmanager
async def stage(directory: Path, **kwargs: Any) -> AsyncIterator[Stage]:
    here = Stage(directory)
    here.node = make_node(
        directory,
        "main",
        "main1",
        KEY,
        local={"main": here.inbox}.get,
        dead_letters=here.letters,
        log=here.log,
        **kwargs,
    )
    await here.node.start()
    try:
        yield here
    finally:
        await here.node.stop(1.0)
        for process in here.processes:
            process.kill()
            process.communicate()


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(90):
            await scene()

    asyncio.run(timed())


def echo(ref: Ref, number: int, timeout: float = 60.0) -> Any:
    return ref.ask(BurnVersion(0, number, "echo"), block=False, timeout=timeout)


def test_three_kills_while_tells_flow(tmp_path: Path) -> None:
    """What each life has received is an unbroken stretch; what none has is a dead letter."""

    async def scene() -> None:
        async with stage(tmp_path) as here:
            receiver = await here.start("receiver")
            ref = here.node.ref("receiver")
            numbers = itertools.count()

            async def flow() -> None:
                while True:
                    for _ in range(20):
                        ref.tell(AbortLoad(0, next(numbers), ""))
                    await asyncio.sleep(0.002)

            flowing = asyncio.create_task(flow())
            waits = []
            for _ in range(3):
                await echo(ref, 1)
                ref.watch(here.inbox)
                before = len(here.inbox.told)
                await asyncio.sleep(0.2)
                loop = asyncio.get_running_loop()
                begin = loop.time()
                receiver.kill()
                await here.inbox.has(before + 1)
                waits.append(loop.time() - begin)
                receiver = await here.start("receiver")
            await echo(ref, 2)
            flowing.cancel()
            await echo(ref, 3)  # on the lane of the tells: all of them have arrived
            num_told = next(numbers)
            stretches = [here.received("receiver", life) for life in (1, 2, 3, 4)]
            dead = {message.version for _, message, _ in here.letters.all}
            for stretch in stretches:
                assert stretch
                assert stretch == list(range(stretch[0], stretch[-1] + 1))
            received = list(itertools.chain(*stretches))
            assert received == sorted(set(received))
            # a message that was received and not acknowledged before the kill is reported as well:
            # a dead letter says "not known to be delivered"
            assert set(received) | dead == set(range(num_told))
            assert len(here.letters.all) == len(dead)
            assert here.inbox.told == [Down("receiver", "the process of receiver has ended")] * 3
            assert max(waits) < 1.0

    play(scene)


async def proxy(front: str, back: str, cut_every: int) -> asyncio.Server:
    """Pass bytes both ways, and cut the connection each `cut_every` bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(back)
        except ConnectionRefusedError:
            writer.transport.abort()
            return
        ends = (writer, far_writer)
        left = cut_every

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            nonlocal left
            with contextlib.suppress(ConnectionError):
                while left > 0 and (data := await source.read(4096)):
                    sink.write(data[:left])  # the last frame is cut somewhere inside
                    left -= len(data)
            for each in ends:
                each.close()

        try:
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        finally:  # the test may end first, and cancels this
            for each in ends:
                each.transport.abort()

    return await asyncio.start_unix_server(serve, front)


def test_cuts_in_mid_stream_lose_double_and_reorder_nothing(tmp_path: Path) -> None:
    count = 6000

    async def scene() -> None:
        places = {"receiver": f"unix:{tmp_path}/front"}
        async with stage(tmp_path, locate=lambda name: Address.parse(places[name])) as here:
            server = await proxy(f"{tmp_path}/front", f"{tmp_path}/receiver", 20_011)
            await here.start("receiver")
            ref = here.node.ref("receiver")
            ref.watch(here.inbox)
            back = ref.ask(BurnVersion(0, count, "flood"), block=False, timeout=60.0)
            for number in range(count):
                ref.tell(AbortLoad(0, number, ""))
                if number % 50 == 0:
                    await asyncio.sleep(0)
            assert await back == VersionBurnt(count)
            assert await echo(ref, 1) == VersionBurnt(1)
            told = await here.inbox.has(count)
            assert here.received("receiver", 1) == list(range(count))
            assert [message.version for message in told] == list(range(count))
            assert not here.letters.all
            server.close()

    play(scene)


def test_a_wrong_key_ends_asks_and_tells_nobody_the_key(tmp_path: Path) -> None:
    wrong = bytes(range(1, 33))

    async def scene() -> None:
        async with stage(tmp_path) as here:
            receiver = await here.start("receiver", wrong)
            ref = here.node.ref("receiver")
            for _ in range(2):
                with pytest.raises(AuthFailed, match="do not hold the same key"):
                    await echo(ref, 1)
            receiver.kill()
            _, stderr = receiver.communicate()
            assert stderr.count(b"auth_failed") == 1
            assert wrong.hex().encode() not in stderr
            assert KEY.hex().encode() not in stderr

    play(scene)


def test_a_stopped_process_is_not_dead(tmp_path: Path) -> None:
    """SIGSTOP for longer than a heartbeat: nothing is lost, nobody is told of a death."""

    async def scene() -> None:
        limits = Limits(suspect_s=2.0)
        async with stage(tmp_path, limits=limits) as here:
            receiver = await here.start("receiver")
            ref = here.node.ref("receiver")
            ref.watch(here.inbox)
            await echo(ref, 1)
            receiver.send_signal(signal.SIGSTOP)
            loop = asyncio.get_running_loop()
            begin = loop.time()
            for number in range(5000):
                ref.tell(AbortLoad(0, number, "x" * 100))
            await here.log.has("peer_silent")
            assert loop.time() - begin >= 1.0
            assert here.node.links()[0].connected
            receiver.send_signal(signal.SIGCONT)
            assert await echo(ref, 2) == VersionBurnt(2)
            assert here.received("receiver", 1) == list(range(5000))
            assert not here.inbox.told
            assert not here.letters.all
            receiver.kill()
            with pytest.raises(ActorDead):
                await echo(ref, 3)

    play(scene)
