"""Arrays in shared memory: written once, read in place, and by nobody who could be harmed by it."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import random
import resource
import subprocess
import sys
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
from ratchet.transport.mailbox.shared import (
    Array,
    FileName,
    Loan,
    Memory,
    PeerFiles,
    Place,
    Unreadable,
    make_probe,
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


def _file(size: int, seals: int) -> shared.File:
    file = shared._new_file()
    os.ftruncate(file.fd, size)
    fcntl.fcntl(file.fd, fcntl.F_ADD_SEALS, seals)
    return file


@pytest.mark.parametrize(
    ("size", "seals", "place", "text"),
    [
        (9, shared._seals() & ~fcntl.F_SEAL_SHRINK, Place(0, 0, 9), "not sealed"),
        (9, shared._seals() & ~fcntl.F_SEAL_WRITE, Place(0, 0, 9), "not sealed"),
        (9, shared._seals(), Place(0, 0, 10), "outside its file"),
        (9, shared._seals(), Place(0, 10, 0), "outside its file"),
        (9, shared._seals(), Place(0, -1, 3), "outside its file"),
        (9, shared._seals(), Place(0, 0, -1), "outside its file"),
        (9, shared._seals(), Place(1, 0, 9), "file 1 of 1"),
        (9, shared._seals(), Place(-1, 0, 9), "file -1 of 1"),
        (0, shared._seals(), Place(0, 0, 0), "empty"),
    ],
)
def test_a_file_that_is_not_as_promised_is_refused(
    size: int, seals: int, place: Place, text: str
) -> None:
    file = _file(size, seals)
    with pytest.raises(ProtocolError, match=text):
        MINE.arrays([file.name], [place])


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(b"x" * 9)
    os.mkfifo(tmp_path / "pipe")
    for name, flags, text in (
        ("disk", os.O_RDONLY, "not sealed"),
        ("pipe", os.O_RDWR, "not what it says"),
        ("", os.O_RDONLY, "not what it says"),
    ):
        file = shared.File(os.open(tmp_path / name, flags))
        with pytest.raises(ProtocolError, match=text):
            MINE.arrays([file.name], [Place(0, 0, 9)])
    file = _file(9, shared._seals())
    with pytest.raises(ProtocolError, match="not what it says"):
        MINE.arrays([FileName(file.fd, file.name.inode + 1)], [Place(0, 0, 9)])


def test_a_file_that_is_closed_is_out_of_reach() -> None:
    for name in (FileName(-1, 5), FileName(10**9, 5)):
        with pytest.raises(Unreadable):
            MINE.arrays([name], [Place(0, 0, 9)])


def test_arrays_stay_when_whoever_wrote_them_is_killed() -> None:
    code = """
import sys
from ratchet.transport.mailbox.shared import Loan
loan = Loan([b"ab" * 30_000])
loan.fill(1 << 30)
name = loan.names[0]
print(name.fd, name.inode, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as writer:
        assert writer.stdout is not None
        name = FileName(*map(int, writer.stdout.readline().split()))
        names, places = [name], [Place(0, 0, 60_000)]
        [array] = PeerFiles(writer.pid).arrays(names, places)
        writer.kill()
        writer.wait()
    assert array == b"ab" * 30_000
    with pytest.raises(Unreadable):
        PeerFiles(writer.pid).arrays(names, places)


def test_arrays_are_copied_once_descriptors_are_scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    loan = whole(ARRAYS)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4, 4))
    assert read(loan) == list(ARRAYS)
    assert {type(each) for each in read(loan)} == {bytes}


def test_whatever_a_peer_names_is_refused_or_read() -> None:
    rng, loan, outcomes = random.Random(0), whole(ARRAYS), set[str]()
    numbers = (-1, 0, 1, 2, 3, 50_001, 1 << 40, (1 << 63) - 1)
    for _ in range(2000):
        fd = rng.choice((loan.names[0].fd, *range(-1, 30), 1 << 40))
        link = Path(f"/proc/self/fd/{fd}")
        name = FileName(fd, link.stat().st_ino if rng.random() < 0.5 and link.exists() else 1)
        place = Place(rng.choice((0, 0, 0, 1)), rng.choice(numbers), rng.choice(numbers))
        try:
            arrays = MINE.arrays([name] * rng.randrange(3), [place])
        except (ProtocolError, Unreadable) as error:
            outcomes.add(type(error).__name__)
        else:
            assert list(map(len, arrays)) == [place.num_bytes]
            outcomes.add("read")
    assert outcomes == {"ProtocolError", "Unreadable", "read"}


def test_a_probe_tells_whether_files_can_be_read() -> None:
    probe = make_probe()
    assert probe is not None
    assert MINE.can_read(probe.name)
    assert not MINE.can_read(FileName(probe.fd, probe.name.inode + 1))
    assert not PeerFiles(1 << 30).can_read(probe.name)


# --- over a socket


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
