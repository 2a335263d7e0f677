"""Nobody waits for an end of shared memory that is gone, stuck, or was never there."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal

import pytest
from tests.helpers.shared_ends import MANIFEST, NUM_BUCKETS, Ends, Taker, check_all, nothing, send

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.finalize import Arrived
from ratchet.transport.weights.shared_reader import SharedReader


def test_a_reader_without_room_is_dropped_in_time_for_the_others(ends: Ends) -> None:
    quick, stuck = Taker(), Taker(rooms=2)
    sharing, loads = ends.open({1: quick, 2: stuck})
    send(sharing, timeout_s=0.3)
    loads[1].result(10)
    check_all(quick)
    assert sharing.ranks == {1}
    assert "took no bucket for 0.3 s" in sharing.lost[2]
    stuck.rooms.release(NUM_BUCKETS)
    with pytest.raises(TransferFailed, match="goes on without this engine"):
        loads[2].result(10)
    assert not stuck.trailer


def test_a_reader_that_does_not_come_is_dropped_in_time_for_the_others(ends: Ends) -> None:
    taker = Taker()
    sharing, loads = ends.open({1: taker}, absent=2)
    send(sharing, timeout_s=0.2)
    loads[1].result(10)
    check_all(taker)
    assert list(sharing.lost) == [2]


def test_the_only_reader_has_the_whole_time_and_no_more(ends: Ends) -> None:
    sharing, loads = ends.open({1: Taker(rooms=2)}, timeout_s=0.3)
    send(sharing, timeout_s=0.2)
    assert not sharing.ranks
    assert "0.2 s" in sharing.lost[1]
    with pytest.raises(TransferFailed, match="no room"):
        loads[1].result(10)


def test_a_reader_that_hangs_up_is_lost_at_once(ends: Ends) -> None:
    taker, gone = Taker(), SharedReader()
    sharing, loads = ends.open({1: taker}, absent=2)
    gone.knock(ends.ring.address, "transfer-1", 2, Deadline(5.0))
    looks = itertools.count(1)

    def hang_up_at_last() -> None:
        if next(looks) == 4:
            gone.hang_up()

    send(sharing, check=hang_up_at_last)
    loads[1].result(10)
    check_all(taker)
    assert sharing.lost == {2: "it hung up"}


def test_whoever_is_told_to_go_on_without_a_reader_does(ends: Ends) -> None:
    taker = Taker()
    sharing, loads = ends.open({1: taker, 2: Taker(rooms=2)}, timeout_s=0.5)
    send(sharing, check=lambda: sharing.lose(2, "it left"))
    loads[1].result(10)
    check_all(taker)
    sharing.lose(2, "told twice")
    assert sharing.lost == {2: "it left"}


def test_a_check_ends_the_wait_of_either_end(ends: Ends) -> None:
    def give_up() -> None:
        msg = "given up"
        raise TransferFailed(msg)

    sharing, _ = ends.open({}, absent=1)
    with pytest.raises(TransferFailed, match="given up"):
        sharing.wait_for_room(1, Deadline(20.0), give_up)
    reader = SharedReader()
    reader.knock(ends.ring.address, "another", 1, Deadline(1.0))
    with pytest.raises(TransferFailed, match="given up"):
        reader.receive(MANIFEST, Taker(), None, Deadline(20.0), give_up)  # type: ignore[arg-type]
    reader.leave()


def test_a_trainer_that_leaves_ends_its_readers_at_once(ends: Ends) -> None:
    taker = Taker()
    sharing, loads = ends.open({1: taker})
    send(sharing, buckets=range(2))
    assert taker.took[1].wait(10)
    ends.ring.leave()
    with pytest.raises(TransferFailed, match="or is gone"):
        loads[1].result(5)


def test_a_trainer_that_stands_still_is_not_waited_for(ends: Ends) -> None:
    _, loads = ends.open({1: Taker()}, timeout_s=0.2)
    with pytest.raises(TransferFailed, match=r"nothing more within 0.2 s"):
        loads[1].result(5)


def _read_and_stop(address: str) -> None:
    reader = SharedReader()
    reader.knock(address, "transfer-1", 1, Deadline(20.0))
    reader.receive(MANIFEST, Stopper(), None, Deadline(20.0), nothing)  # type: ignore[arg-type]


class Stopper(Taker):
    def put_bucket(self, arrived: Arrived) -> None:
        super().put_bucket(arrived)
        if len(self.buckets) == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_reader_that_is_killed_is_lost_at_once(ends: Ends) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=_read_and_stop, args=(ends.ring.address,)
    )
    taker = Taker()
    process.start()
    sharing, loads = ends.open({2: taker}, absent=1)
    send(sharing)
    loads[2].result(10)
    process.join(10)
    check_all(taker)
    assert sharing.lost == {1: "it hung up"}
