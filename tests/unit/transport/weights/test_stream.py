"""One end's part in a round: what it has had is neither lost nor overwritten by a later round, and
the wire does not stand still between two buckets.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch
from tests.helpers.weights import FakeSource, make_tensors, specs_of

from ratchet.errors import TransferFailed
from ratchet.transport.weights import pieces
from ratchet.transport.weights.gathering import Gathering
from ratchet.transport.weights.groups import Deadline
from ratchet.transport.weights.inbox import EngineStuck, Inbox
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.plan import make_manifest
from ratchet.transport.weights.stream import receive_round, send_round

CPU = torch.device("cpu")
MANIFEST = make_manifest(specs_of(make_tensors(1), {}), 2**17, term=1, version=1, step=1)
NUM_BUCKETS = len(MANIFEST.bucket_bytes)


class FakeGroup:
    """Fills each bucket with a number of its own, and breaks where it is told to."""

    name = "group"
    device = CPU

    def __init__(self, first: int, breaks_at: int | None, base: int) -> None:
        self.part = first
        self.breaks_at = breaks_at
        self.base = base

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def move(self, data: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        part = self.part
        self.part += 1
        if part < NUM_BUCKETS:
            assert len(data) == MANIFEST.bucket_bytes[part]

        def wait() -> None:
            if part == self.breaks_at:
                msg = "a member was lost"
                raise TransferFailed(msg)
            data.fill_(self.base + part)

        return wait

    def close(self) -> None:
        pass


@pytest.mark.parametrize("breaks_at", range(NUM_BUCKETS + 1))
def test_what_is_sent_again_goes_nowhere_near_what_is_staged(breaks_at: int) -> None:
    async def main() -> None:
        inbox = Inbox(NUM_BUCKETS, MANIFEST.bucket_bytes, lambda: lambda: None)
        assert inbox.is_whole
        link = Link("127.0.0.1", 1, "unused", CPU)
        with pytest.raises(TransferFailed, match="lost"):
            receive_round(link, FakeGroup(0, breaks_at, 10), MANIFEST, inbox, 0, Deadline(1.0), 1.0)
        assert inbox.has == breaks_at
        receive_round(link, FakeGroup(0, None, 100), MANIFEST, inbox, 0, Deadline(1.0), 1.0)
        for part in range(NUM_BUCKETS):
            arrived = await inbox.bucket()
            assert arrived.bucket.unique().tolist() == [part + (10 if part < breaks_at else 100)]
        assert set(await inbox.trailer()) == {100 + NUM_BUCKETS}

    asyncio.run(main())


class Wire(FakeGroup):
    """Notes what is begun, and what has arrived."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, int]] = []

    def move(self, data: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        number = sum(name == "begun" for name, _ in self.notes)
        self.notes.append(("begun", number))
        return lambda: self.notes.append(("arrived", number))


SOURCE = FakeSource({f"p{n}": torch.zeros(64) for n in range(6)})
PAIRS = make_manifest(SOURCE.specs(), 512, term=1, version=1, step=1)
"""Three buckets, of two pieces each where 256 bytes are large."""


def order(wire: Wire) -> str:
    """Return what was begun (b) and has arrived (a), in order; the trailer is the seventh."""
    return "".join("t" if number == 6 else name[0] for name, number in wire.notes)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "LARGE_BYTES", 256)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("alone", [True, False])
def test_a_lane_that_is_alone_sends_ahead(alone: bool) -> None:
    """Others would wait for the buffer that it then has beside the one that travels."""
    lanes = ["a"] if alone else ["a", "b"]
    staging = [torch.zeros(512, dtype=torch.uint8) for _ in range(2)]
    gathering = Gathering(PAIRS, SOURCE, lambda: staging, lanes)
    thread = threading.Thread(target=gathering.run)
    thread.start()
    link, wire = Link("127.0.0.1", 1, "unused", CPU), Wire()
    try:
        send_round(link, wire, gathering, "a", 0, Deadline(20.0), 20.0)
    finally:
        gathering.stop()
        thread.join(20)
    assert order(wire) == ("bbabbaabbtaaat" if alone else "bbaabbaabbtaat")


@pytest.mark.usefixtures("large")
def test_an_engine_with_room_receives_ahead() -> None:
    async def main() -> None:
        inbox = Inbox(3, PAIRS.bucket_bytes, lambda: lambda: None)
        link, wire = Link("127.0.0.1", 1, "unused", CPU), Wire()
        receive_round(link, wire, PAIRS, inbox, 0, Deadline(1.0), 1.0)
        assert order(wire) == "bbabbaabbtaaat"

    asyncio.run(main())


@pytest.mark.usefixtures("large")
def test_an_engine_without_room_gets_what_has_arrived_before_it_is_waited_for() -> None:
    async def main() -> None:
        inbox = Inbox(3, PAIRS.bucket_bytes[:2], lambda: lambda: None)
        link, wire = Link("127.0.0.1", 1, "unused", CPU), Wire()
        with pytest.raises(EngineStuck):
            receive_round(link, wire, PAIRS, inbox, 0, Deadline(0.05), 0.05)
        assert order(wire) == "bbabbaaa"
        assert inbox.has == 2

    asyncio.run(main())
