"""The group of a worker and its servers: both ends in one process, by the same protocol."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch
from torch import distributed as dist

from ratchet.backends.rollout.sglang.client import CallRefused
from ratchet.backends.rollout.sglang.group import ServerGroup, flatten
from ratchet.errors import TransferFailed

c10d: Any = dist


class Server:
    """Stands in for a client: its one rank joins as torch's own function does, on a thread."""

    url = "http://server"

    def __init__(self) -> None:
        self.refuses: str | None = None
        self.asked: dict[str, Any] = {}
        self.group: Any = None

    async def init_group(self, **asked: Any) -> None:
        self.asked = asked
        if self.refuses is not None:
            raise CallRefused("POST", 400, self.refuses)
        await asyncio.to_thread(self._join)

    async def destroy_group(self, name: str) -> None:
        assert name == self.asked["name"]
        self.group = None

    def _join(self) -> None:
        asked = self.asked
        store = c10d.TCPStore(asked["address"], asked["port"], asked["world_size"], False)
        for prefix in (asked["name"], f"{asked['name']}/", "cpu/"):
            store = c10d.PrefixStore(prefix, store)
        self.group = c10d.ProcessGroupGloo(store, asked["rank_offset"], asked["world_size"])

    async def receive(self, size: int) -> torch.Tensor:
        bucket = torch.empty(size, dtype=torch.uint8)
        await asyncio.to_thread(self._broadcast, bucket)
        return bucket

    def _broadcast(self, bucket: torch.Tensor) -> None:
        self.group.broadcast([bucket], c10d.BroadcastOptions()).wait()


def run(
    body: Callable[[ServerGroup, list[Server]], Awaitable[None]], sizes: Sequence[int] = (1, 1)
) -> None:
    async def main() -> None:
        servers: Any = [Server() for _ in sizes]
        group = ServerGroup(servers, sizes, "127.0.0.1")
        async with asyncio.timeout(30):
            try:
                await body(group, servers)
            finally:
                await group.close()

    asyncio.run(main())


def test_every_rank_receives_the_tensors_one_after_another() -> None:
    tensors = [torch.randn(3, 5), torch.ones(3, dtype=torch.bfloat16), torch.tensor([True])]

    async def body(group: ServerGroup, servers: list[Server]) -> None:
        await group.form(20)
        assert [server.asked["rank_offset"] for server in servers] == [1, 2]
        assert {server.asked["world_size"] for server in servers} == {3}
        for _ in range(2):
            got, again, _ = await asyncio.gather(
                *(server.receive(67) for server in servers), group.send(tensors, 20)
            )
            assert torch.equal(got, again)
            assert torch.equal(got[:60].view(torch.float32).view(3, 5), tensors[0])
            assert torch.equal(got[60:66].view(torch.bfloat16), tensors[1])
        assert not dist.is_initialized()

    run(body)


def test_offsets_leave_room_for_the_ranks_of_each_server() -> None:
    async def body(group: ServerGroup, servers: list[Server]) -> None:
        servers[0]._join = lambda: None  # type: ignore[method-assign]
        servers[1].refuses = "not today"
        with pytest.raises(TransferFailed, match="not today"):
            await group.form(0.3)
        assert [server.asked["rank_offset"] for server in servers] == [1, 5]
        assert servers[0].asked["world_size"] == 6

    run(body, sizes=(4, 1))


def test_who_does_not_come_is_waited_for_until_the_deadline() -> None:
    async def body(group: ServerGroup, servers: list[Server]) -> None:
        servers[0]._join = lambda: None  # type: ignore[method-assign]
        with pytest.raises(TransferFailed):
            await group.form(0.3)

    run(body, sizes=[1])


def test_a_rank_that_is_lost_ends_the_broadcast() -> None:
    large = [torch.zeros(2**24)]  # more than a socket takes

    async def body(group: ServerGroup, servers: list[Server]) -> None:
        await group.form(20)
        sent = group.send(large, 20)
        await asyncio.sleep(0)
        servers[0].group = None
        with pytest.raises(TransferFailed):
            await sent
        assert threading.active_count() < 10

    run(body, sizes=[1])


def test_to_close_unblocks_a_rank_that_waits() -> None:
    async def body(group: ServerGroup, servers: list[Server]) -> None:
        await group.form(20)
        waiting = asyncio.create_task(servers[0].receive(8))
        await asyncio.sleep(0.05)
        held = servers[0].group  # the server is too busy to leave
        await group.close()
        with pytest.raises(RuntimeError):
            await waiting
        del held

    run(body, sizes=[1])


def test_what_lies_one_after_another_is_sent_from_where_it_lies() -> None:
    memory = torch.arange(64, dtype=torch.uint8)
    parts = [memory[8:16].view(torch.float32), memory[16:24].view(torch.bfloat16)]
    flat = flatten(parts)
    assert flat.data_ptr() == memory[8:].data_ptr()
    assert torch.equal(flat, memory[8:24])
    with_gap = [memory[8:16].view(torch.float32), memory[20:24].view(torch.bfloat16)]
    copied = flatten(with_gap)
    assert copied.data_ptr() != memory[8:].data_ptr()
    assert torch.equal(copied, torch.cat([memory[8:16], memory[20:24]]))
    assert torch.equal(flatten([memory[:16].view(4, 4).t()]), memory[:16].view(4, 4).t().flatten())
