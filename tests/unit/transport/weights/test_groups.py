"""Which backend carries a transfer, and how a group of two or of more moves bytes."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from torch.distributed import HashStore, Store

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.groups import GlooGroup, choose_backend

HOST = "127.0.0.1"


def in_threads(size: int, act: Callable[[GlooGroup, int], None]) -> None:
    """Run `act` in every member of a group, and raise what one of them raises."""
    store, errors = HashStore(), list[BaseException]()

    def member(rank: int) -> None:
        group = None
        try:
            deadline = Deadline(20.0)
            group = GlooGroup(store, "g", rank, size, address=HOST, deadline=deadline)
            act(group, rank)
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)
        finally:
            if group is not None:
                group.close()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_bytes_go_from_rank_0_to_all_others_in_order(size: int) -> None:
    def act(group: GlooGroup, rank: int) -> None:
        buckets = [group.allocate(1000), group.allocate(1000)]
        if rank == 0:
            for n, bucket in enumerate(buckets, 1):
                bucket += n
        deadline = Deadline(20.0)
        for wait in [group.move(bucket, deadline) for bucket in buckets]:
            wait()
        assert [int(bucket.sum()) for bucket in buckets] == [1000, 2000]

    in_threads(size, act)


@pytest.mark.parametrize("size", [2, 3])
def test_who_waits_for_a_member_that_sends_nothing_ends_by_the_deadline(size: int) -> None:
    def act(group: GlooGroup, rank: int) -> None:
        if rank == 0:
            assert done.wait(20)
        else:
            try:
                with pytest.raises(TransferFailed):
                    group.move(group.allocate(1000), Deadline(0.2))()
            finally:
                done.set()

    done = threading.Event()
    in_threads(size, act)


@pytest.mark.parametrize("size", [2, 3])
def test_a_member_that_goes_ends_the_wait_of_the_others_at_once(size: int) -> None:
    def act(group: GlooGroup, rank: int) -> None:
        if rank:
            with pytest.raises(TransferFailed):
                group.move(group.allocate(1000), Deadline(60.0))()

    in_threads(size, act)


def threads_of_gloo() -> set[str]:
    found = set[str]()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if (task / "comm").read_text() == "gloo_tcp_loop\n":
                found.add(task.name)
    return found


def received_bytes() -> dict[str, int]:
    """What has arrived at each TCP socket of this process, by its inode."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it has just been closed, or is of another kind
            inode = str(link.readlink())
            with socket.socket(fileno=os.dup(int(link.name))) as same:
                info = same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
            (found[inode],) = struct.unpack_from("Q", info, 128)  # tcpi_bytes_received
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_pieces_take_two_connections_in_turns(size: int) -> None:
    def act(group: GlooGroup, rank: int) -> None:
        pieces = [group.allocate(2**20) for _ in range(6)]
        for wait in [group.move(piece, Deadline(20.0)) for piece in pieces]:
            wait()
        everyone.wait()
        if rank == 0:
            found.update(received_bytes())
        everyone.wait()

    everyone, found = threading.Barrier(size, timeout=20), dict[str, int]()
    before = received_bytes()
    in_threads(size, act)
    moved = [number for inode, number in found.items() if inode not in before and number > 2**20]
    assert len(moved) == 2 * (size - 1)
    assert all(number < 4 * 2**20 for number in moved)


def test_a_member_that_does_not_come_is_waited_for_without_gloo() -> None:
    """gloo crashes where one comes in the moment in which it is given up."""
    before = threads_of_gloo()
    with pytest.raises(TransferFailed) as given_up:
        GlooGroup(HashStore(), "g", 1, 2, address=HOST, deadline=Deadline(0.05))
    assert threads_of_gloo() <= before  # and the traceback would hold what there is
    del given_up


def test_those_who_have_come_have_time_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted(distributed.ProcessGroupGloo):
        def __init__(self, store: Store, rank: int, size: int, options: Any) -> None:
            given.append(options._timeout)
            super().__init__(store, rank, size, options)

    given: list[timedelta] = []
    monkeypatch.setattr(distributed, "ProcessGroupGloo", Noted)
    GlooGroup(HashStore(), "g", 0, 1, address=HOST, deadline=Deadline(0.05)).close()
    assert given == [timedelta(seconds=2)]


def begin_three(group: GlooGroup) -> None:
    """The other stream of a lost member may not know yet."""
    for _ in range(3):
        group.move(group.allocate(1000), Deadline(60.0))


def test_the_error_of_an_operation_does_not_keep_the_group_alive() -> None:
    def act(group: GlooGroup, rank: int) -> None:
        if rank == 0:
            return
        with pytest.raises(TransferFailed):
            group.move(group.allocate(1000), Deadline(60.0))()
        with pytest.raises(TransferFailed) as not_begun:
            begin_three(group)
        group.close()
        deadline = Deadline(5.0)
        while threads_of_gloo() - before and deadline.left_s:
            time.sleep(0.005)  # the kernel's list of threads is behind
        assert not threads_of_gloo() - before
        del not_begun

    before = threads_of_gloo()
    in_threads(2, act)


@pytest.mark.parametrize(
    ("configured", "devices", "num_engines", "expected"),
    [
        ("gloo", 8, 1, "gloo"),
        ("nccl", 8, 1, "nccl"),
        ("auto", 0, 1, "gloo"),
        ("auto", 1, 1, "gloo"),
        ("auto", 2, 1, "nccl"),
        ("auto", 2, 2, "gloo"),
        ("auto", 4, 3, "nccl"),
    ],
)
def test_auto_takes_nccl_where_every_member_can_have_a_device(
    configured: str,
    devices: int,
    num_engines: int,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: devices > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert choose_backend(configured, num_engines) == expected
