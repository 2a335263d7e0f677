"""Who a node lets in, and whom it refuses, turns away, shows out or gives up."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.helpers.node_scenes import ask, cut, echo, note, virtual
from tests.helpers.nodes import KEY, MemoryWire, Town

from ratchet.errors import AuthFailed, ConfigError
from ratchet.messages import Down, VersionBurnt
from ratchet.transport.mailbox.limits import Limits


def test_a_wrong_key_is_clear_on_both_ends_and_said_once() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b", key=bytes(32))
        ref = a.node.ref("b")
        ref.tell(note(1))
        ref.watch(a.inbox)
        with pytest.raises(AuthFailed, match="b refuses the link: a and b do not hold the same"):
            await ask(ref)
        assert isinstance(town.wire, MemoryWire)
        dials = town.wire.num_dials
        for _ in range(3):
            with pytest.raises(AuthFailed):
                await ask(ref)
        ref.watch(a.inbox)
        await asyncio.sleep(60.0)
        assert town.wire.num_dials == dials == 1  # not retried
        assert [m for _, m, _ in a.letters.all] == [note(1)]
        assert [type(m) for m in a.inbox.told] == [Down, Down]
        assert len(a.log.named("link_refused")) == 1
        assert len(b.log.named("auth_failed")) == 1
        assert b.log.named("auth_failed")[0]["peer"] == "a"
        with pytest.raises(AuthFailed, match="a refuses the link"):
            await ask(b.node.ref("a"))
        assert not b.inbox.told
        for host in (a, b):
            for event in host.log.events:
                assert KEY.hex() not in str(event)
                assert repr(KEY) not in str(event)

    virtual(scene)


def test_a_refused_peer_that_comes_with_the_right_key_is_welcome() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        wrong = await town.start("b", key=bytes(32))
        with pytest.raises(AuthFailed):
            await ask(a.node.ref("b"))
        wrong.kill()
        right = await town.start("b")
        right.inbox.answer = echo
        right.node.ref("a").tell(note(1))
        await a.inbox.has(1)
        assert await ask(a.node.ref("b"), 2) == VersionBurnt(2)

    virtual(scene)


def test_another_run_is_refused() -> None:
    async def scene(town: Town) -> None:
        a, _ = await town.start("a"), await town.start("b", run_id="other")
        with pytest.raises(AuthFailed, match="a is of run 'run' and b of 'other'"):
            await ask(a.node.ref("b"))

    virtual(scene)


@pytest.mark.parametrize("key", [b"", b"short"])
def test_a_missing_key_is_a_mistake_of_the_configuration(key: bytes) -> None:
    async def scene(town: Town) -> None:
        with pytest.raises(ConfigError, match=f"link key of a has {len(key)} bytes"):
            town.build("a", key=key)

    virtual(scene)


def test_an_address_that_another_name_has_taken_counts_as_nobody_there() -> None:
    async def scene(town: Town) -> None:
        a, b, c = await town.start("a"), await town.start("b"), await town.start("c")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(note(1))
        await b.inbox.has(1)
        town.hosts["b"] = c  # b's port is c's now
        b.kill()
        [down] = await a.inbox.has(1)
        assert down == Down("b", "the process of b has ended")
        assert not c.inbox.told

    virtual(scene)


def test_a_way_that_cannot_exist_fails_at_once() -> None:
    async def scene(town: Town) -> None:
        def locate(name: str) -> Any:
            raise ConfigError(f"no address for {name}")

        a = await town.start("a", locate=locate)
        with pytest.raises(ConfigError, match="no address for b"):
            await ask(a.node.ref("b"))

    virtual(scene)


def test_too_many_connections_are_turned_away() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")
        hosts = [await town.start(f"b{i}") for i in range(4)]
        for host in hosts:
            host.node.ref("a").tell(note(1))
        await asyncio.sleep(1.0)
        assert len(a.inbox.told) == 2
        assert len(a.node._connections) == 2
        for host in hosts:
            if host.node.links()[0].connected:
                host.kill()
        await asyncio.sleep(2.0)
        assert len(a.inbox.told) == 4

    virtual(scene, Limits(connections=2))


def test_a_stranger_that_says_nothing_is_shown_out() -> None:
    async def scene(town: Town) -> None:
        a = await town.start("a")

        class Mute(asyncio.BufferedProtocol):
            lost = False

            def get_buffer(self, sizehint: int) -> memoryview:
                return memoryview(bytearray(1000))

            def buffer_updated(self, nbytes: int) -> None:
                pass

            def connection_lost(self, exc: Exception | None) -> None:
                self.lost = True

        mute = Mute()
        assert town.wire is not None
        await town.wire.dial(a.node.address, lambda: mute)
        await asyncio.sleep(4.9)
        assert not mute.lost
        assert len(a.node._connections) == 1
        await asyncio.sleep(0.2)
        assert mute.lost
        assert not a.node._connections

    virtual(scene)


def test_a_peer_that_breaks_the_protocol_is_given_up() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(note(1))
        await b.inbox.has(1)
        connection = a.node._peers["b"]._out.connection
        assert connection is not None
        connection.write(b"\x00\x00\x00\x01\xc1")
        [down] = await a.inbox.has(1)
        assert down.name == "b"
        assert len(b.log.named("link_broken")) == 1
        a.node.ref("b").tell(note(2))
        await b.inbox.has(2)

    virtual(scene)


def test_a_peer_that_claims_too_much_at_the_hello_is_given_up() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").tell(note(1))
        await b.inbox.has(1)
        b.node._peers["a"].session._lanes[0].delivered = 99
        cut(town)
        await asyncio.sleep(1.0)
        a.node.ref("b").tell(note(2))
        await b.inbox.has(2)
        assert [host.node.links()[0].connected for host in (a, b)] == [True, True]

    virtual(scene)
