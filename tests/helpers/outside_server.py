"""Inference servers as weight sync sees them: processes that join a group and take flattened
buckets as SGLang's tensor-parallel ranks do, and what their worker does with them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from tests.helpers.weights import FakeSink
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from ratchet.errors import TransferFailed
from ratchet.transport.weights.outside import Meeting
from ratchet.types import TensorSlot

Command = dict[str, Any]


# --- a rank, in a process of its own


def run_rank(conn: Connection) -> None:
    torch.set_num_threads(1)
    rank = _Rank()
    while True:
        command = msgspec.msgpack.decode(conn.recv_bytes())
        try:
            value = getattr(rank, command.pop("do"))(**command.pop("arguments"))
        except Exception as error:  # noqa: BLE001 - as the server does
            command |= {"ok": False, "value": str(error)}
        else:
            command |= {"ok": True, "value": value}
        conn.send_bytes(msgspec.msgpack.encode(command))


class _Rank:
    def __init__(self) -> None:
        self.groups: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def join(self, host: str, port: int, group: str, rank: int, size: int) -> None:
        timeout = c10d.default_pg_timeout
        store, _, _ = next(dist.rendezvous(f"tcp://{host}:{port}", rank, size, timeout=timeout))
        store.set_timeout(timeout)
        made, _ = c10d._new_process_group_helper(
            size,
            rank,
            [],
            dist.Backend("gloo"),
            dist.PrefixStore(group, store),
            group_name=group,
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[made] = {i: i for i in range(size)}
        self.groups[group] = made

    def load(self, group: str, names: list, dtypes: list, shapes: list) -> None:
        """Without gaps, and with an error where that leaves a tensor unaligned."""
        ends = []
        end = 0
        for dtype, shape in zip(dtypes, shapes, strict=True):
            kind = getattr(torch, dtype)
            if end % kind.itemsize:
                raise ValueError(f"unaligned: {dtype} at {end}")
            end += torch.Size(shape).numel() * kind.itemsize
            ends.append(end)
        bucket = torch.empty(end, dtype=torch.uint8)
        dist.broadcast(bucket, src=0, group=self.groups[group])
        start = 0
        for name, dtype, shape, stop in zip(names, dtypes, shapes, ends, strict=True):
            part = bucket[start:stop].view(getattr(torch, dtype))
            self.tensors[name] = part.reshape(shape).clone()
            start = stop

    def leave(self, group: str) -> None:
        dist.destroy_process_group(self.groups.pop(group))

    def held(self) -> list[str]:
        return sorted(self.groups)

    def bytes_of(self, name: str) -> bytes:
        return self.tensors[name].view(-1).view(torch.uint8).numpy().tobytes()


class Rank:
    """The worker's hold on a rank."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.outside_server"])
        self._conn, theirs = context.Pipe()
        self.process = context.Process(target=run_rank, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._gone = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._conn.fileno(), self._readable)

    async def call(self, do: str, **arguments: Any) -> Any:
        if self._gone:
            raise TransferFailed("the server is gone")
        number = len(self._replies)
        reply = self._replies[number] = self._loop.create_future()
        command = {"do": do, "arguments": arguments, "number": number}
        self._conn.send_bytes(msgspec.msgpack.encode(command))
        return await reply

    def stop(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        if not self._gone:
            self._loop.remove_reader(self._conn.fileno())
        self._conn.close()

    def _readable(self) -> None:
        try:
            answer = msgspec.msgpack.decode(self._conn.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._gone = True
            self._loop.remove_reader(self._conn.fileno())
            for reply in self._replies.values():
                if not reply.done():
                    reply.set_exception(TransferFailed("the server is gone"))
            return
        reply = self._replies[answer["number"]]
        if reply.done():  # nobody waits any more
            return
        if answer["ok"]:
            reply.set_result(answer["value"])
        else:
            reply.set_exception(TransferFailed(answer["value"]))


# --- the engine


class FakeServers:
    """Servers of `sizes` ranks; quarantines its engine as servers do."""

    def __init__(self, sizes: Sequence[int], sink: ServedSink) -> None:
        self.sizes = tuple(sizes)
        self.ranks = [[Rank() for _ in range(size)] for size in sizes]
        self._sink = sink
        self.loads = 0
        self.kill_at: int | None = None
        """the load of server 0 in which a rank of it dies"""

    async def join(self, server: int, meeting: Meeting, timeout_s: float) -> None:
        host, port, group, size, _ = meeting
        self._sink.events.append("join")
        await self._all(
            server,
            lambda rank: {"host": host, "port": port, "group": group, "rank": rank, "size": size},
            "join",
        )

    async def begin(self) -> None:
        self._sink.version = None
        self._sink.events.append("begin")

    async def load(
        self, server: int, group: str, slots: Sequence[TensorSlot], timeout_s: float
    ) -> None:
        self._sink.events.append("load")
        self._sink.entered["load"].set()
        if server == 0:
            self.loads += 1
            if self.loads == self.kill_at:
                self.ranks[0][-1].process.kill()
        columns = {
            "names": [slot.name for slot in slots],
            "dtypes": [slot.dtype for slot in slots],
            "shapes": [slot.shape for slot in slots],
        }
        await self._all(server, lambda _: {"group": group, **columns}, "load")

    async def release(self, server: int, group: str) -> None:
        self._sink.events.append("leave")
        await self._all(server, lambda _: {"group": group}, "leave")

    async def _all(self, server: int, arguments: Any, do: str) -> None:
        results = await asyncio.gather(
            *(
                rank.call(do, **arguments(number))
                for number, rank in enumerate(self.ranks[server], 1)
            ),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def hold(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Check that every rank has these values."""
        for rank in (rank for ranks in self.ranks for rank in ranks):
            for name, tensor in tensors.items():
                if tensor.numel():
                    expected = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                    assert await rank.call("bytes_of", name=name) == expected, name

    def end(self) -> None:
        for rank in (rank for ranks in self.ranks for rank in ranks):
            rank.end()


class ServedSink(FakeSink):
    """An engine that serves through others."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], sizes: Sequence[int]) -> None:
        super().__init__(tensors)
        self.outside: FakeServers | None = FakeServers(sizes, self)
