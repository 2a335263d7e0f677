"""The thread that copies into shared memory: what goes on meanwhile, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.groups import finished
from tests.helpers.nodes import Town, stopping

from ratchet.messages import ClaimPrompts
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.copies import Copies
from ratchet.transport.mailbox.shared import Loan

GROUP = finished(1 << 18)  # 2 arrays of 1 MiB
CONTROL = ClaimPrompts("a", "i", 1)


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("copies")]


class Gate:
    """Holds copies up; says on the loop when one has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[Loan] = []
        self.opened = threading.Event()
        self.fails = False
        self._has_begun = asyncio.Event()
        loop, fill = asyncio.get_running_loop(), Loan.fill

        def held(loan: Loan, num_bytes: int) -> bool:
            self.begun.append(loan)
            loop.call_soon_threadsafe(self._has_begun.set)
            assert self.opened.wait(60)
            if self.fails:
                raise OSError("no room")
            return fill(loan, num_bytes)

        monkeypatch.setattr(Loan, "fill", held)

    async def has_begun(self, count: int = 1) -> None:
        while len(self.begun) < count:
            self._has_begun.clear()
            await self._has_begun.wait()


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = count()
    yield
    assert not threads()
    gc.collect()
    assert count() <= before


def on_sockets(directory: Path, scene: Callable[[Town], Coroutine[Any, Any, None]]) -> None:
    async def play() -> None:
        town = Town(lambda name: Address("unix", f"{directory}/{name}"))
        async with asyncio.timeout(60), stopping(town):
            await scene(town)
        for host in town.hosts.values():
            host.inbox.told.clear()

    asyncio.run(play())


def test_two_threads_fill_a_loan_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene() -> None:
        gate, copies = Gate(monkeypatch), Copies()
        loans = [Loan([b"x" * 100_000]) for _ in range(4)]
        ends = [copies.start(loan) for loan in loans]
        await gate.has_begun(2)
        assert len(threads()) == 2
        assert set(gate.begun) == set(loans[:2])
        gate.opened.set()
        assert await asyncio.gather(*ends) == [True] * 4
        assert set(gate.begun) == set(loans)
        copies.close()

    asyncio.run(scene())


def test_the_end_waits_for_what_is_being_copied_and_begins_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scene() -> None:
        gate, copies = Gate(monkeypatch), Copies()
        *begun, last = [copies.start(Loan([b"x" * 100_000])) for _ in range(3)]
        await gate.has_begun(2)
        asyncio.get_running_loop().call_soon(gate.opened.set)
        await asyncio.to_thread(copies.close)
        assert await asyncio.gather(*begun) == [True] * 2
        with pytest.raises(asyncio.CancelledError):
            await last
        assert len(gate.begun) == 2

    asyncio.run(scene())


def test_control_overtakes_a_group_that_is_being_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(town: Town) -> None:
        gate = Gate(monkeypatch)
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").tell(GROUP)
        await gate.has_begun()
        a.node.ref("b").tell(CONTROL)
        assert await b.inbox.has(1) == [CONTROL]
        gate.opened.set()
        assert await b.inbox.has(2) == [CONTROL, GROUP]
        assert len(gate.begun) == 1

    on_sockets(tmp_path, scene)


def test_a_node_that_stops_sends_what_is_being_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(town: Town) -> None:
        gate = Gate(monkeypatch)
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").tell(GROUP)
        await gate.has_begun()
        asyncio.get_running_loop().call_soon(gate.opened.set)
        await a.node.stop(30.0)
        assert b.inbox.told == [GROUP]
        assert not a.letters.all

    on_sockets(tmp_path, scene)


def test_a_node_whose_time_is_up_accounts_for_what_is_being_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(town: Town) -> None:
        gate = Gate(monkeypatch)
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").tell(GROUP)
        a.node.ref("b").tell(GROUP)
        await gate.has_begun()
        close = a.node._copies.close

        def open_and_close() -> None:
            gate.opened.set()
            close()

        monkeypatch.setattr(a.node._copies, "close", open_and_close)
        await a.node.stop(0.0)
        assert not threads()
        assert [message for _, message, _ in a.letters.all] == [GROUP] * 2
        assert not b.inbox.told

    on_sockets(tmp_path, scene)


def test_a_peer_that_dies_ends_what_is_being_copied_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene(town: Town) -> None:
        gate = Gate(monkeypatch)
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(GROUP)
        await gate.has_begun()
        b.kill()
        await a.inbox.has(1)
        assert [message for _, message, _ in a.letters.all] == [GROUP]
        gate.opened.set()
        again = await town.start("b")
        a.node.ref("b").tell(GROUP)
        assert await again.inbox.has(1) == [GROUP]
        await b.node.stop(0.0)

    on_sockets(tmp_path, scene)


def test_nobody_hears_of_a_copy_that_fails_after_its_peer_has_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[dict[str, Any]] = []

    async def scene(town: Town) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
        gate = Gate(monkeypatch)
        gate.fails = True
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(GROUP)
        await gate.has_begun()
        b.kill()
        await a.inbox.has(1)
        gate.opened.set()
        await a.node.stop(1.0)
        await b.node.stop(0.0)
        gc.collect()

    on_sockets(tmp_path, scene)
    gc.collect()
    assert not heard


def test_a_copy_that_fails_is_sent_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Loan, num_bytes: int) -> bool:
        raise OSError("no room")

    async def scene(town: Town) -> None:
        monkeypatch.setattr(Loan, "fill", fail)
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").tell(GROUP)
        [message] = await b.inbox.has(1)
        assert message == GROUP
        assert type(message.group.rollouts[0].completion_ids.data) is bytes

    on_sockets(tmp_path, scene)
