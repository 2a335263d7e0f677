"""One end's part in a round: what it has had is neither lost nor overwritten by a later round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch
from tests.helpers.weights import make_tensors, specs_of

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.inbox import Inbox
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.plan import make_manifest
from ratchet.transport.weights.stream import receive_round

CPU = torch.device("cpu")
MANIFEST = make_manifest(specs_of(make_tensors(1), {}), 2**17, term=1, version=1, step=1)
LARGE = 2**20
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
            receive_round(
                link, FakeGroup(0, breaks_at, 10), MANIFEST, inbox, 0, Deadline(1.0), 1.0, LARGE
            )
        assert inbox.has == breaks_at
        receive_round(link, FakeGroup(0, None, 100), MANIFEST, inbox, 0, Deadline(1.0), 1.0, LARGE)
        for part in range(NUM_BUCKETS):
            arrived = await inbox.bucket()
            assert arrived.bucket.unique().tolist() == [part + (10 if part < breaks_at else 100)]
        assert set(await inbox.trailer()) == {100 + NUM_BUCKETS}

    asyncio.run(main())
