"""What unblocks the thread of a link, and what it then gives up."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.link import Link
from ratchet.transport.weights.store import serve_store

HOST = "127.0.0.1"
CPU = torch.device("cpu")


def run(main: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(30):
            await main()

    asyncio.run(limited())


def test_a_link_that_is_abandoned_tries_no_further() -> None:
    store, _, port = serve_store(HOST)
    link = Link(HOST, port, "test-link", CPU)
    link.abandon()
    with pytest.raises(TransferFailed, match="given up"):
        link.store(Deadline(60.0))
    del store


def test_a_link_that_is_abandoned_stops_polling() -> None:
    async def main() -> None:
        link = Link(HOST, 1, "test-link", CPU)
        begun = threading.Event()

        def never() -> bool:
            begun.set()
            return False

        waiting = link.run(lambda: link.until(never, Deadline(60.0)))
        await asyncio.to_thread(begun.wait, 5)
        link.abandon()
        async with asyncio.timeout(5):
            with pytest.raises(TransferFailed, match="given up"):
                await waiting

    run(main)


def test_a_call_that_fails_drops_the_group() -> None:
    """Peers may wait on it, even where nobody waits for the call any more."""

    async def main() -> None:
        _store, _, port = serve_store(HOST)
        link = Link(HOST, port, "test-link", CPU)
        await link.run(lambda: link.enter("alone", "gloo", 0, 1, Deadline(5.0)))
        assert link.holds == "alone"

        def fail() -> None:
            msg = "a peer is lost"
            raise TransferFailed(msg)

        with pytest.raises(TransferFailed, match="a peer is lost"):
            await link.run(fail)
        assert link.holds is None
        await link.close(1.0)

    run(main)
