"""One piece of shared memory: whose it is, who may change it, and that it is closed once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ratchet.transport.weights.shared_segment import OwnSegment, SeenSegment


def test_memory_is_closed_once() -> None:
    segment = OwnSegment(64, 64)
    number = segment.fd
    segment.close()
    with os.fdopen(os.dup2(os.open(os.devnull, os.O_RDONLY), number)):
        segment.close()
        os.fstat(number)


def test_what_a_reader_writes_stays_its_own() -> None:
    own = OwnSegment(5000, 100)
    seen = [SeenSegment(own.hello, own.fd) for _ in range(2)]
    own.slots[1][:3] = 7
    assert [each.slots[1][2] for each in seen] == [7, 7]
    seen[0].slots[1][2] = 9
    assert own.slots[1][2] == seen[1].slots[1][2] == 7
    other = OwnSegment(5000, 100)
    assert seen[0].is_of(own.fd)
    assert not seen[0].is_of(other.fd)
    own.close()
    other.close()


def test_nobody_can_shrink_the_memory_below_a_reader() -> None:
    own = OwnSegment(5000, 100)
    with pytest.raises(PermissionError):
        os.ftruncate(own.fd, 0)
    own.close()


def test_memory_that_there_is_not_is_an_error_and_nothing_else() -> None:
    def segments() -> set[str]:
        fds = Path("/proc/self/fd").iterdir()
        return {fd.name for fd in fds if "memfd:" in os.path.realpath(fd)}

    before = segments()
    with pytest.raises(OSError, match="bytes of shared memory are needed"):
        OwnSegment(2**50, 0)
    assert segments() <= before  # those of other tests may go
