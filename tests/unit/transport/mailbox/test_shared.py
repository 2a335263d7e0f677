"""Arrays in shared memory: written once, read in place, and by nobody who could be harmed by it."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.groups import finished
from tests.helpers.nodes import Town, stopping

from ratchet.errors import ProtocolError
from ratchet.messages import GroupFinished
from ratchet.transport.mailbox import shared
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.peer_files import PeerFiles, Unreadable
from ratchet.transport.mailbox.shared import (
    Array,
    Loan,
    Memory,
    Place,
)

MINE = PeerFiles(os.getpid())
ARRAYS = tuple(random.Random(size).randbytes(size) for size in (50_001, 1, 40_000))
LARGE = shared.SHARED_BYTES // 8  # tokens, of two arrays with 4 bytes each


def whole(arrays: Sequence[Array]) -> Loan:
    loan = Loan(arrays)
    assert loan.fill(1 << 30)
    return loan


def read(loan: Loan) -> list[Array]:
    return MINE.arrays(loan.names, loan.places)


def inode(array: object) -> int:
    assert isinstance(array, memoryview)
    assert isinstance(array.obj, Memory)
    return array.obj.file.name.inode


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    before = descriptors()
    yield
    if descriptors() > before:
        gc.collect()
    assert descriptors() <= before


def test_arrays_are_read_where_they_were_written() -> None:
    got = read(whole(ARRAYS))
    assert got == list(ARRAYS)
    assert len({inode(each) for each in got}) == 1
    assert all(isinstance(each, memoryview) and each.readonly for each in got)


def test_what_is_passed_on_is_not_copied() -> None:
    one, other = read(whole(ARRAYS)), read(whole(ARRAYS[:1]))
    mixed = (other[0], one[2], b"x" * 1000, one[0])
    loan = whole(mixed)
    got = read(loan)
    assert got == list(mixed)
    assert inode(got[0]) == inode(other[0])
    assert inode(got[1]) == inode(got[3]) == inode(one[0])
    assert len(loan.names) == 3
    assert loan.places[3] == Place(1, 0, len(ARRAYS[0]))


def test_a_part_of_a_view_is_bytes_like_any_others() -> None:
    [array] = read(whole(ARRAYS[:1]))
    assert isinstance(array, memoryview)
    assert shared.is_lasting(array)
    assert not shared.is_lasting(array[1:])
    assert not shared.is_lasting(memoryview(bytearray(3)))


def test_arrays_are_copied_slice_by_slice_and_lent_when_they_are_whole() -> None:
    loan = Loan(ARRAYS)
    size = sum(map(len, ARRAYS))
    for _ in range(size // 10_000):
        assert not loan.fill(10_000)
        with pytest.raises(ProtocolError, match="not sealed"):
            read(loan)
    assert loan.fill(10_000)
    assert read(loan) == list(ARRAYS)


def test_a_message_may_have_many_arrays() -> None:
    arrays = [bytes([each % 256]) * 9 for each in range(2000)]
    assert read(whole(arrays)) == arrays


def test_nobody_can_change_what_is_lent() -> None:
    loan = whole(ARRAYS)
    fd = loan.names[0].fd
    for change in (
        lambda: os.pwrite(fd, b"?", 0),
        lambda: os.ftruncate(fd, 0),
        lambda: os.ftruncate(fd, 1 << 20),
        lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, 0),
    ):
        with pytest.raises(PermissionError):
            change()


def on_sockets(address: str, scene: Callable[[Town], Coroutine[Any, Any, None]]) -> None:
    async def play() -> None:
        town = Town(lambda name: Address.parse(address.format(name=name)))
        async with asyncio.timeout(60), stopping(town):
            await scene(town)

    asyncio.run(play())


def arrays_of(message: GroupFinished) -> list[Any]:
    return [
        message.group.rollouts[0].completion_ids.data,
        message.group.rollouts[0].prompt_ids.data,
    ]


def test_a_group_crosses_two_links_of_one_host_in_one_piece_of_memory(tmp_path: Path) -> None:
    async def scene(town: Town) -> None:
        a, b, c = [await town.start(name) for name in "abc"]
        a.node.ref("b").tell(finished(LARGE))
        [first] = await b.inbox.has(1)
        b.node.ref("c").tell(first)
        [second] = await c.inbox.has(1)
        assert first == second == finished(LARGE)
        large, small = arrays_of(first)
        assert inode(large) == inode(arrays_of(second)[0])
        assert large.obj is not arrays_of(second)[0].obj
        assert type(small) is bytes
        b.node.ref("c").tell(finished(LARGE - 1))
        assert type(arrays_of((await c.inbox.has(2))[1])[0]) is bytes  # not worth it
        for host in (a, b, c):
            host.inbox.told.clear()

    on_sockets(f"unix:{tmp_path}/{{name}}", scene)


def test_hosts_share_nothing() -> None:
    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").tell(finished(LARGE))
        [message] = await b.inbox.has(1)
        assert message == finished(LARGE)
        assert type(arrays_of(message)[0]) is bytes

    on_sockets("tcp:127.0.0.1:0", scene)


def test_a_peer_whose_files_are_elsewhere_sends_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a container of its own: it has a socket here, and other numbers for its processes."""
    monkeypatch.setattr(PeerFiles, "behind", lambda conn: PeerFiles(1 << 30))

    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").tell(finished(LARGE))
        [message] = await b.inbox.has(1)
        assert message == finished(LARGE)
        assert type(arrays_of(message)[0]) is bytes
        assert not b.log.named("link_cut")

    on_sockets(f"unix:{tmp_path}/{{name}}", scene)


def test_files_that_get_out_of_reach_are_sent_again_as_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: PeerFiles, names: Any, places: Any) -> list[Array]:
        raise Unreadable("Too many open files")

    monkeypatch.setattr(PeerFiles, "arrays", fail)

    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        sizes = [LARGE, 1, LARGE + 10, LARGE + 20]
        for size in sizes:
            a.node.ref("b").tell(finished(size))
        assert await b.inbox.has(4) == [finished(size) for size in sizes]
        assert len(b.log.named("memory_not_shared")) == 1
        assert not a.letters.all
        a.node.ref("b").tell(finished(LARGE))
        assert (await b.inbox.has(5))[4] == finished(LARGE)
        assert len(b.log.named("memory_not_shared")) == 1

    on_sockets(f"unix:{tmp_path}/{{name}}", scene)


def test_a_peer_that_lies_about_its_files_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "fcntl", lambda *args: 0)  # it seals nothing
    monkeypatch.setattr(PeerFiles, "can_read", lambda self, probe: True)

    async def scene(town: Town) -> None:
        a, b = await town.start("a"), await town.start("b")
        a.node.ref("b").watch(a.inbox)
        a.node.ref("b").tell(finished(LARGE))
        await a.inbox.has(1)
        assert "not sealed" in b.log.named("link_broken")[0]["error"]
        assert not b.inbox.told

    on_sockets(f"unix:{tmp_path}/{{name}}", scene)
