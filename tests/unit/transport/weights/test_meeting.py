"""What the two ends of a transfer tell each other, and who is waited for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch

from ratchet.errors import TransferFailed
from ratchet.transport.weights import meeting as meeting_module
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.meeting import (
    Answers,
    Go,
    Ready,
    announce,
    gather_ready,
    wait_for_go,
)
from ratchet.transport.weights.store import serve_store
from ratchet.types import WeightRoute

HOST = "127.0.0.1"
CPU = torch.device("cpu")
ENGINES = {1: "e0/a", 2: "e1/a", 3: "e2/a"}


class Room:
    """A trainer's link and an engine's, on one thread."""

    def __init__(self) -> None:
        self.store, _, self.port = serve_store(HOST)
        self.trainer = Link(HOST, self.port, "test-link", CPU)
        self.engine = Link(HOST, self.port, "test-link", CPU)
        self.answers = Answers(60.0)

    def route(self, rank: int) -> WeightRoute:
        return WeightRoute("broadcast", "gloo", HOST, self.port, "t", rank, 4, 20.0)

    def come(self, *ready: Ready, number: int = 1) -> None:
        for each in ready:
            announce(self.engine, self.route(each.rank), number, each, Deadline(20.0))

    def gather(
        self, left: Mapping[str, str] | None = None, *, number: int = 1, limit_s: float = 20.0
    ) -> tuple[dict[int, Ready], dict[int, str]]:
        return gather_ready(self.trainer, "t", number, ENGINES, left or {}, Deadline(limit_s))


@pytest.fixture
def room() -> Iterator[Room]:
    room = Room()
    yield room
    room.trainer.abandon()
    room.engine.abandon()


def test_all_come(room: Room) -> None:
    ready = [Ready(rank, None, has=rank) for rank in (3, 1, 2)]
    room.come(*ready)
    assert room.gather() == ({each.rank: each for each in ready}, {})


def test_who_cannot_take_part_says_why(room: Room) -> None:
    room.come(Ready(1, None), Ready(2, None, failure="x is missing"), Ready(3, "g"))
    came, lost = room.gather()
    assert set(came) == {1, 3}
    assert lost == {2: "it cannot take part: x is missing"}


def test_who_does_not_come_is_waited_for_until_the_deadline(room: Room) -> None:
    room.come(Ready(1, None))
    came, lost = room.gather(limit_s=0.1)
    assert set(came) == {1}
    assert lost == dict.fromkeys((2, 3), "it did not come to the transfer within 0.1 s")


def test_who_has_left_is_not_waited_for(room: Room) -> None:
    room.come(Ready(1, None), Ready(3, None))
    came, lost = room.gather({"e1/a": "dead", "e2/a": "it refused after it came"})
    assert set(came) == {1, 3}
    assert lost == {2: "dead"}


def test_what_a_stranger_puts_into_the_store_ends_no_transfer(room: Room) -> None:
    store = room.trainer.store(Deadline(20.0))
    store.queue_push("t/1/ready", "no word of ours")
    room.come(Ready(1, None))
    came, lost = room.gather({"e1/a": "dead", "e2/a": "dead"})
    assert (set(came), set(lost)) == ({1}, {2, 3})
    store.set("t/2/go/1", "no word of ours")
    with pytest.raises(TransferFailed, match="the trainer's answer cannot be read"):
        wait_for_go(room.engine, room.route(1), 2, Deadline(20.0))


def test_a_round_hears_only_its_own(room: Room) -> None:
    room.come(Ready(1, None), Ready(2, None), Ready(3, None))
    room.come(Ready(1, None, has=4), number=2)
    came, lost = room.gather(number=2, limit_s=0.1)
    assert {rank: ready.has for rank, ready in came.items()} == {1: 4}
    assert set(lost) == {2, 3}


def test_everyone_gets_an_answer_of_their_own(room: Room) -> None:
    for rank in (1, 2):
        go = Go("g", rank=rank, size=3, first=5)
        room.answers.give(room.trainer.store(Deadline(20.0)), "t", 2, rank, go)
    for rank in (1, 2):
        go = wait_for_go(room.engine, room.route(rank), 2, Deadline(20.0))
        assert go == Go("g", rank=rank, size=3, first=5)
    with pytest.raises(TransferFailed, match=r"did not begin the transfer within 0\.1 s"):
        wait_for_go(room.engine, room.route(3), 2, Deadline(0.1))
    with pytest.raises(TransferFailed, match="did not begin"):
        wait_for_go(room.engine, room.route(1), 3, Deadline(0.1))


def test_an_answer_without_a_group_is_an_error_in_the_trainers_words(room: Room) -> None:
    store = room.trainer.store(Deadline(20.0))
    room.answers.give(store, "t", 1, 1, Go(None, failure="it goes on without you"))
    with pytest.raises(TransferFailed, match="it goes on without you"):
        wait_for_go(room.engine, room.route(1), 1, Deadline(20.0))


def test_answers_stay_until_nobody_can_wait_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(meeting_module, "monotonic", lambda: now[0])
    store, _, _ = serve_store(HOST)
    answers = Answers(lifetime_s=10.0)
    for n in range(5):
        now[0] = 4.0 * n
        answers.give(store, f"transfer-{n}", 1, 2, Go("group"))
    kept = [n for n in range(5) if store.check([f"transfer-{n}/1/go/2"])]
    assert kept == [2, 3, 4]
