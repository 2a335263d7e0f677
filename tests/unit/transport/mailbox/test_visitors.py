"""Nodes without a door, in virtual time: they come, ask, go, and nothing is left of them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.helpers.nodes import Host, MemoryWire, Town, memory_town, stopping
from tests.simulation.loop import run_virtual

from ratchet.errors import ActorDead, AuthFailed
from ratchet.messages import AbortLoad, BurnVersion, Down, VersionBurnt
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.peer import Peer
from ratchet.transport.mailbox.refs import RemoteRef
from ratchet.transport.mailbox.session import Session


def virtual(
    scene: Callable[[Town], Coroutine[Any, Any, None]], limits: Limits | None = None
) -> None:
    async def play() -> None:
        async with asyncio.timeout(36_000), stopping(memory_town(limits or Limits())) as town:
            await scene(town)

    run_virtual(play())


def note(number: int) -> AbortLoad:
    return AbortLoad(0, number, "note")


async def ask(host: Host, name: str, number: int = 0) -> VersionBurnt:
    question = BurnVersion(0, number, "ask")
    return await host.node.ref(name).ask(question, block=False, timeout=10.0)


async def start_registry(town: Town) -> Host:
    registry = await town.start("registry")
    registry.inbox.answer = lambda message: VersionBurnt(message.version)
    return registry


class Hanging(MemoryWire):
    """A network in which no dial ends."""

    async def dial(self, *args: Any) -> None:
        await asyncio.Event().wait()


def news(host: Host) -> list[Any]:
    """What somebody who reads the log gets to see of visitors."""
    visits = [fields.get("peer", "").startswith("visitor") for _, _, fields in host.log.events]
    events = zip(host.log.events, visits, strict=True)
    return [event for event, is_visit in events if is_visit and event[0] != "debug"]


def test_a_visitor_opens_no_door_and_is_answered() -> None:
    async def scene(town: Town) -> None:
        registry, visitor = await start_registry(town), await town.start("visitor")
        assert visitor.node.address is None
        assert visitor.node._listener is None
        assert await ask(visitor, "registry", 7) == VersionBurnt(7)
        # while it is there, it can be told things too
        registry.node.ref("visitor").tell(note(1))
        await visitor.inbox.has(1)

    virtual(scene)


def test_a_visitor_need_not_know_the_run() -> None:
    async def scene(town: Town) -> None:
        await start_registry(town)
        knows_not = await town.start("visitor-1", run_id="")
        assert await ask(knows_not, "registry", 7) == VersionBurnt(7)
        errs = await town.start("visitor-2", run_id="other")
        with pytest.raises(AuthFailed, match="visitor-2 is of run 'other' and registry of 'run'"):
            await ask(errs, "registry")
        holds_no_key = await town.start("visitor-3", run_id="", key=bytes(32))
        with pytest.raises(AuthFailed, match="do not hold the same key"):
            await ask(holds_no_key, "registry")

    virtual(scene)


def num_kept() -> int:
    """What a peer consists of, of all nodes of this process."""
    gc.collect()
    # by `type`, not `isinstance`: some lazy module's attributes would be looked up
    return sum(type(thing) in (Peer, Session, RemoteRef) for thing in gc.get_objects())


@pytest.mark.parametrize("leave", [True, False])
def test_many_visits_leave_nothing_behind(leave: bool) -> None:
    async def scene(town: Town) -> None:
        registry = await start_registry(town)
        role = await town.start("buffer")
        await ask(role, "registry")
        before = num_kept()
        for i in range(200):
            visitor = await town.start(f"visitor-{i}")
            assert await ask(visitor, "registry", i) == VersionBurnt(i)
            if i % 2:
                registry.node.ref(visitor.node.name).tell(note(i))
                await visitor.inbox.has(1)
            if leave:
                await visitor.node.stop(1.0)
            else:
                await asyncio.sleep(1.0)  # what it has received is acknowledged by then
                visitor.kill()
            del town.hosts[visitor.node.name], visitor
        await asyncio.sleep(20.0)
        assert [link.peer for link in registry.node.links()] == ["buffer"]
        assert [link.peer for link in registry.node.links()] == ["buffer"]
        assert not registry.node._refs
        assert num_kept() == before
        assert not news(registry)
        assert not registry.letters.all

    virtual(scene)


def test_a_visitor_that_is_cut_off_has_time_to_come_back() -> None:
    async def scene(town: Town) -> None:
        registry, visitor = await start_registry(town), await town.start("visitor")
        await ask(visitor, "registry")
        registry.node.ref("visitor").watch(registry.inbox)
        assert town.wire is not None
        town.wire.cut()  # type: ignore[attr-defined]
        registry.node.ref("visitor").tell(note(1))
        await visitor.inbox.has(1)
        assert not [m for m in registry.inbox.told if not isinstance(m, BurnVersion)]
        visitor.kill()
        loop = asyncio.get_running_loop()
        begin = loop.time()
        down = (await registry.inbox.has(2))[-1]
        assert down.reason == "visitor did not come back within 15 s"
        assert 15.0 <= loop.time() - begin <= 16.1
        assert not news(registry)

    virtual(scene)


def test_a_ref_that_is_held_finds_the_next_bearer_of_the_name() -> None:
    async def scene(town: Town) -> None:
        registry = await start_registry(town)
        held = registry.node.ref("visitor")
        for i in range(3):
            visitor = await town.start("visitor")
            await ask(visitor, "registry")
            held.tell(note(i))
            assert await visitor.inbox.has(1) == [note(i)]
            await visitor.node.stop(1.0)
            await asyncio.sleep(100.0)
            assert registry.node.ref("visitor") is held

    virtual(scene)


def test_the_replaced_life_of_a_forgotten_peer_is_not_let_in_again() -> None:
    async def scene(town: Town) -> None:
        registry, old = await start_registry(town), await town.start("visitor")
        await ask(old, "registry")
        assert old.node._ticker is not None
        old.node._ticker.cancel()  # its loop hangs: no heartbeat, no dial
        wire, old.node._wire = old.node._wire, Hanging()
        await asyncio.sleep(30.0)
        assert not registry.node.links()
        new = await town.start("visitor")
        await ask(new, "registry")
        old.node._wire = wire
        old.node._tick()
        await asyncio.sleep(1.0)
        with pytest.raises(ActorDead, match="a newer process has taken the name visitor"):
            await ask(old, "registry")
        assert await ask(new, "registry", 3) == VersionBurnt(3)

    virtual(scene)


def test_a_peer_is_kept_while_its_hello_is_under_way() -> None:
    """What the hello agreed on is the session that the link then serves."""

    async def scene(town: Town) -> None:
        registry, visitor = await start_registry(town), await town.start("visitor")
        forget = registry.node._forget
        session_with = registry.node._session_with

        def at_the_worst_moment(hello: Any) -> Session:
            session = session_with(hello)
            asyncio.get_running_loop().call_soon(forget)
            return session

        registry.node._session_with = at_the_worst_moment
        await ask(visitor, "registry")
        registry_peer, visitor_peer = (
            registry.node._peers["visitor"],
            visitor.node._peers["registry"],
        )
        assert registry_peer.session.life == visitor_peer.session.peer_life
        assert visitor_peer.session.life == registry_peer.session.peer_life

    virtual(scene)


def test_the_end_of_a_role_is_remembered() -> None:
    """It can be dialled, so it may come back: until then whoever watches it is told at once."""

    async def scene(town: Town) -> None:
        registry, role = await start_registry(town), await town.start("buffer")
        await ask(role, "registry")
        role.kill()
        await asyncio.sleep(100.0)
        [status] = registry.node.links()
        assert status.trouble == "the process of buffer has ended"
        registry.node.ref("buffer").watch(registry.inbox)
        assert registry.inbox.told[-1] == Down("buffer", "the process of buffer has ended")

    virtual(scene)


def test_what_waits_for_a_peer_keeps_it() -> None:
    async def scene(town: Town) -> None:
        registry = await start_registry(town)
        registry.node.ref("visitor").tell(note(1))
        registry.node.ref("visitor").watch(registry.inbox)
        await asyncio.sleep(25.0)
        visitor = await town.start("visitor")
        await ask(visitor, "registry")
        assert await visitor.inbox.has(1) == [note(1)]
        # and what nobody came for is accounted for, and then forgotten
        registry.node.ref("visitor-2").tell(note(2))
        await asyncio.sleep(35.0)
        assert [message for _, message, _ in registry.letters.all] == [note(2)]
        assert [link.peer for link in registry.node.links()] == ["visitor"]

    virtual(scene)
