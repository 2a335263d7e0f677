from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ratchet.transport.mailbox import huge_pages
from ratchet.transport.mailbox.huge_pages import HUGE_BYTES, use_huge_pages
from ratchet.transport.mailbox.shared import Loan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files in memory are Linux's")


@pytest.fixture
def fd() -> Iterator[int]:
    number = os.memfd_create("test", os.MFD_CLOEXEC)
    yield number
    os.close(number)


def allocated(fd: int) -> int:
    return os.fstat(fd).st_blocks * 512


def gives_huge_pages() -> bool:
    release = tuple(map(int, platform.release().split("-")[0].split(".")[:2]))
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return release >= (6, 1) and setting.exists() and "[deny]" not in setting.read_text()


@pytest.mark.skipif(not gives_huge_pages(), reason="this kernel has none for shared memory")
def test_whole_extents_are_there_at_once(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[int] = []

    def madvise(*where: int) -> int:
        result: int = libc.madvise(*where)
        errors.append(ctypes.get_errno() if result else 0)
        return result

    libc = huge_pages._LIBC
    seen = SimpleNamespace(mmap=libc.mmap, munmap=libc.munmap, madvise=madvise)
    monkeypatch.setattr(huge_pages, "_LIBC", seen)
    use_huge_pages(fd, 3 * HUGE_BYTES + 5)
    assert os.fstat(fd).st_size == 3 * HUGE_BYTES + 5
    if errors in ([errno.ENOMEM], [errno.EAGAIN], [errno.EBUSY]):
        pytest.skip("there are no huge pages left at this moment")
    assert errors == [0]
    assert allocated(fd) == 3 * HUGE_BYTES
    assert os.pread(fd, HUGE_BYTES, HUGE_BYTES) == bytes(HUGE_BYTES)


def test_a_file_of_less_than_one_has_its_size_and_no_page(fd: int) -> None:
    use_huge_pages(fd, HUGE_BYTES - 1)
    assert os.fstat(fd).st_size == HUGE_BYTES - 1
    assert allocated(fd) == 0


@pytest.mark.parametrize("refused", ["no room", "another place", "no pages"])
def test_what_the_kernel_refuses_costs_nothing_else(
    fd: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {
        "no room": [huge_pages._FAILED],
        "another place": [HUGE_BYTES + 1, huge_pages._FAILED],
        "no pages": [HUGE_BYTES + 1, 2 * HUGE_BYTES],
    }[refused]
    asked: list[object] = []
    libc = SimpleNamespace(
        mmap=lambda *_: places.pop(0),
        munmap=lambda *where: asked.append(where),
        madvise=lambda *where: asked.append(where) or -1,
    )
    monkeypatch.setattr(huge_pages, "_LIBC", libc)
    use_huge_pages(fd, HUGE_BYTES)
    unmapped = (HUGE_BYTES + 1, 2 * HUGE_BYTES)
    collapsed = (2 * HUGE_BYTES, HUGE_BYTES, 25)
    assert asked == {"no room": [], "another place": [unmapped]}.get(refused, [collapsed, unmapped])
    assert os.fstat(fd).st_size == HUGE_BYTES
    os.pwrite(fd, b"ab", HUGE_BYTES - 2)
    assert os.pread(fd, 3, HUGE_BYTES - 2) == b"ab"


def test_a_loan_of_many_bytes_holds_what_it_was_given() -> None:
    arrays = [os.urandom(HUGE_BYTES + 3), os.urandom(100), os.urandom(2 * HUGE_BYTES)]
    loan = Loan(arrays)
    assert loan.fill(loan.num_bytes)
    found = [os.pread(loan._own.fd, place.num_bytes, place.offset) for place in loan.places]
    assert found == arrays


def test_a_loan_that_is_filled_bit_by_bit_keeps_its_pages() -> None:
    array = os.urandom(2 * HUGE_BYTES + 7)
    loan = Loan([array])
    while not loan.fill(300_000):
        pass
    assert os.pread(loan._own.fd, len(array), 0) == array
