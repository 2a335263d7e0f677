"""The files of a peer: read, or refused, whatever it says of them."""

from __future__ import annotations

import fcntl
import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.transport.mailbox.test_shared import (
    ARRAYS,
    MINE,
    _no_descriptor_is_left,
    read,
    whole,
)

from ratchet.errors import ProtocolError
from ratchet.transport.mailbox import shared
from ratchet.transport.mailbox.peer_files import PeerFiles, Unreadable
from ratchet.transport.mailbox.shared import (
    FileName,
    Place,
    make_probe,
)

__all__ = ["_no_descriptor_is_left"]  # a fixture of every test here, too


def _file(size: int, seals: int) -> shared.File:
    file = shared._new_file()
    os.ftruncate(file.fd, size)
    fcntl.fcntl(file.fd, fcntl.F_ADD_SEALS, seals)
    return file


@pytest.mark.parametrize(
    ("size", "seals", "place", "text"),
    [
        (9, shared.seals() & ~fcntl.F_SEAL_SHRINK, Place(0, 0, 9), "not sealed"),
        (9, shared.seals() & ~fcntl.F_SEAL_WRITE, Place(0, 0, 9), "not sealed"),
        (9, shared.seals(), Place(0, 0, 10), "outside its file"),
        (9, shared.seals(), Place(0, 10, 0), "outside its file"),
        (9, shared.seals(), Place(0, -1, 3), "outside its file"),
        (9, shared.seals(), Place(0, 0, -1), "outside its file"),
        (9, shared.seals(), Place(1, 0, 9), "file 1 of 1"),
        (9, shared.seals(), Place(-1, 0, 9), "file -1 of 1"),
        (0, shared.seals(), Place(0, 0, 0), "empty"),
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
    file = _file(9, shared.seals())
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
