"""Real sockets in one process: who may reach them, what is left behind, what strangers can do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import stat
import tracemalloc
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.nodes import KEY, Town, stopping

from ratchet.errors import ConfigError
from ratchet.messages import AbortLoad, BurnVersion, VersionBurnt
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.codec import pack
from ratchet.transport.mailbox.frames import PROTOCOL, Ack, Data, Failure, Hello, Proof
from ratchet.transport.mailbox.limits import Limits


def on_sockets(
    directory: Path, scene: Callable[[Town], Coroutine[Any, Any, None]], **limits: Any
) -> None:
    async def play() -> None:
        town = Town(lambda name: Address.parse(f"unix:{directory}/{name}"), Limits(**limits))
        async with asyncio.timeout(60), stopping(town):
            await scene(town)

    asyncio.run(play())


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_socket_is_for_its_owner_only_and_gone_afterwards(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "sockets"

    async def scene(town: Town) -> None:
        a = await town.start("a")
        assert mode(directory) == 0o700
        assert mode(directory / "a") == 0o600
        await a.node.stop(1.0)
        assert not (directory / "a").exists()

    on_sockets(directory, scene)


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o750)

    async def scene(town: Town) -> None:
        a = town.build("a")
        with pytest.raises(ConfigError, match=f"mode 0750 .*: chmod 700 {tmp_path}"):
            await a.node.start()

    on_sockets(tmp_path, scene)


def test_the_socket_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "b"))  # closed without unlink, as by a kill

    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").tell(AbortLoad(0, 1, ""))
        await b.inbox.has(1)

    on_sockets(tmp_path, scene)


def test_an_address_in_use_is_refused(tmp_path: Path) -> None:
    async def scene(town: Town) -> None:
        await town.start("a")
        second = Town(town.place).build("a")
        with pytest.raises(ConfigError, match=r"unix:.*/a cannot be bound.* another process"):
            await second.node.start()
        tcp = Address.parse("tcp:127.0.0.1:0")
        c = await town.start("c", address=tcp)
        assert c.node.address.port > 0
        second = Town(lambda name: c.node.address).build("d")
        with pytest.raises(ConfigError, match=f"{c.node.address} cannot be bound"):
            await second.node.start()
        assert (tmp_path / "a").is_socket()

    on_sockets(tmp_path, scene)


def test_a_socket_taken_over_by_the_next_life_is_left_to_it(tmp_path: Path) -> None:
    async def scene(town: Town) -> None:
        old = await town.start("a")
        (tmp_path / "a").unlink()
        await town.start("a")
        await old.node.stop(1.0)
        assert (tmp_path / "a").is_socket()

    on_sockets(tmp_path, scene)


def test_a_watcher_learns_of_a_death_over_a_real_socket(tmp_path: Path) -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(AbortLoad(0, 1, ""))
        await b.inbox.has(1)
        b.kill()
        [down] = await a.inbox.has(1)
        assert down.reason == "the process of b has ended"

    on_sockets(tmp_path, scene)


def test_a_long_message_and_its_long_answer_come_through(tmp_path: Path) -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        b.inbox.answer = lambda message: VersionBurnt(len(message.reason))
        text = "x" * 5_000_000
        reply = a.node.ref("b").ask(BurnVersion(0, 1, text), block=False, timeout=30.0)
        assert await reply == VersionBurnt(5_000_000)
        assert b.inbox.told[0].reason == text

    on_sockets(tmp_path, scene)


def mutated(rng: random.Random) -> bytes:
    """What a stranger sends: frames out of turn, changed, cut short, or plain noise."""
    frames = [
        Hello(PROTOCOL, "x", "a", "x/1", "run", b"n" * 32),
        Proof(b"m" * 32, "life", (0, 0)),
        Data((0, 0), 0, 1, [Failure(1, "k", "t")]),
        Ack((0, 0)),
    ]
    stream = bytearray(b"".join(bytes(pack(f)) for f in rng.choices(frames, k=rng.randrange(1, 5))))
    for _ in range(rng.randrange(6)):
        stream[rng.randrange(len(stream))] = rng.randrange(256)
    if rng.random() < 0.2:
        stream[:] = rng.randbytes(rng.randrange(1, 2000))
    return bytes(stream[: rng.randrange(1, len(stream) + 1)])


def test_strangers_with_random_frames_change_nothing(tmp_path: Path) -> None:
    """1,500 connections, some 4,000 frames: none crashes the node, gets a link, or stays."""
    rng = random.Random(0)

    async def strange(address: Address) -> None:
        reader, writer = await asyncio.open_unix_connection(address.host)
        writer.write(mutated(rng))
        if rng.random() < 0.5:
            writer.write_eof()
            await reader.read()
        writer.transport.abort()

    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.inbox.answer = lambda message: VersionBurnt(message.version)
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
        tracemalloc.start()
        # the buffers of an honest link are no growth
        await b.node.ref("a").ask(BurnVersion(0, 6, ""), block=False, timeout=20.0)
        before = 0
        for i in range(75):
            await asyncio.gather(*(strange(a.node.address) for _ in range(20)))
            if i == 25:
                before, _ = tracemalloc.get_traced_memory()
        reply = b.node.ref("a").ask(BurnVersion(0, 7, ""), block=False, timeout=20.0)
        assert await reply == VersionBurnt(7)
        after, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert not problems
        assert [link.peer for link in a.node.links()] == ["b"]
        assert a.inbox.told == [BurnVersion(0, 6, ""), BurnVersion(0, 7, "")]
        assert a.node.num_refused > 300
        a.log.events.clear()
        assert after - before < 2 << 20
        assert peak < 32 << 20

    on_sockets(tmp_path, scene, hello_s=1.0)


def test_a_stranger_cannot_make_the_node_buffer(tmp_path: Path) -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        reader, writer = await asyncio.open_unix_connection(a.node.address.host)
        writer.write((1 << 30).to_bytes(4, "big") + b"x" * 100_000)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.transport.abort()
        assert a.node.num_refused == 1

    on_sockets(tmp_path, scene)


def test_a_peer_that_holds_the_key_and_sends_random_frames_spoils_only_its_link(
    tmp_path: Path,
) -> None:
    rng = random.Random(2)
    honest = [
        bytes(pack(Data((0, 0), 0, 1, [Failure(1, "k", "t")] * 3))),
        bytes(pack(Ack((0, 0)))),
    ]

    async def scene(town: Town) -> None:
        a = await town.start("a")
        a.inbox.answer = lambda message: VersionBurnt(message.version)
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
        for _ in range(30):
            b = await town.start("b")
            b.node.ref("a").tell(AbortLoad(0, 1, ""))
            before = len(a.inbox.told)
            await a.inbox.has(before + 1)
            connection = b.node._peers["a"]._out.connection
            assert connection is not None
            for _ in range(20):
                stream = bytearray(rng.choice(honest))
                for _ in range(rng.randrange(1, 4)):
                    stream[rng.randrange(4, len(stream))] = rng.randrange(256)
                connection.write(stream)
            await b.node.stop(0.1)
        c = await town.start("c")
        reply = c.node.ref("a").ask(BurnVersion(0, 7, ""), block=False, timeout=20.0)
        assert await reply == VersionBurnt(7)
        assert not problems
        assert len(a.log.named("link_broken")) > 15
        assert KEY.hex() not in str(a.log.events)

    on_sockets(tmp_path, scene)
