"""The process group between a rollout worker and the tensor-parallel ranks of its servers.

Consumes tensors, produces them at every rank as one flattened bucket; this end is rank 0. Waits for
the servers to join and to receive, on a thread of its own, each time up to a deadline. Who leaves
closes its connections, which unblocks all that wait for it: `close` does so at both ends.

The store listens on one address, on a port that the system chose, and the group is outside torch's
default one: gloo, also for servers with a GPU, where torch takes the bytes through the host.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import distributed as dist

from ratchet.backends.rollout.sglang.client import CallFailed
from ratchet.backends.rollout.sglang.session import LEAVE_S
from ratchet.errors import TransferFailed
from ratchet.transport.weights.buckets import flat_bytes
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.groups import called
from ratchet.transport.weights.outside import DEVICES, server_store
from ratchet.transport.weights.store import serve_store
from ratchet.transport.weights.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ratchet.backends.rollout.sglang.client import SGLangClient

_c10d: Final[Any] = dist


class ServerGroup:
    """One group, until a member is lost: then it is closed, and another one made."""

    def __init__(self, servers: Sequence[SGLangClient], sizes: Sequence[int], host: str) -> None:
        """Serve the store.

        Args:
            servers: that join.
            sizes: how many tensor-parallel ranks each has.
            host: address of this machine that they reach.
        """
        self.name = f"ratchet-{uuid.uuid4().hex[:12]}"
        self._servers = tuple(servers)
        self._sizes = tuple(sizes)
        self._store, self._host, self._port = serve_store(host)
        self._worker = Worker("ratchet-sglang-group")
        self._group: Any = None

    async def form(self, timeout_s: float) -> None:
        """Meet all ranks.

        Raises:
            TransferFailed: if a server does not come.
        """
        size = 1 + sum(self._sizes)
        offsets = [1 + sum(self._sizes[:index]) for index in range(len(self._sizes))]
        deadline = Deadline(timeout_s)
        joined = [
            server.init_group(
                address=self._host,
                port=self._port,
                rank_offset=offset,
                world_size=size,
                name=self.name,
                backend="gloo",
                timeout_s=timeout_s,
            )
            for server, offset in zip(self._servers, offsets, strict=True)
        ]
        mine = self._worker.run(partial(self._join, size, deadline))
        try:
            await _all_or_first_error(mine, *joined)
        except CallFailed as error:
            raise TransferFailed(str(error)) from None

    def send(self, tensors: Sequence[torch.Tensor], timeout_s: float) -> asyncio.Future[None]:
        """Broadcast a flattened bucket; the result raises `TransferFailed` if a rank was lost or is
        late.

        Args:
            tensors: on any device, in their order in the bucket, which fits all their item sizes.
                They are not to be changed until the result is there.
            timeout_s: for all of it.
        """
        return self._worker.run(partial(self._broadcast, tensors, Deadline(timeout_s)))

    async def close(self) -> None:
        """Leave, and tell the servers to. If this end still waits for one of them, that ends with
        their connections, or else by its own deadline, on a thread that nobody waits for.
        """
        self._worker.stop(last=self._drop)
        leaving = (server.destroy_group(self.name) for server in self._servers)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await asyncio.gather(*leaving, return_exceptions=True)

    # --- on the thread

    def _join(self, size: int, deadline: Deadline) -> None:
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = deadline.left
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=self._host)]
        store = _c10d.PrefixStore(DEVICES["gloo"], server_store(self._store, self.name))
        self._group = called(lambda: _c10d.ProcessGroupGloo(store, 0, size, options))

    def _broadcast(self, tensors: Sequence[torch.Tensor], deadline: Deadline) -> None:
        if self._group is None:
            msg = "the servers have no process group"
            raise TransferFailed(msg)
        options = _c10d.BroadcastOptions()
        options.rootRank = 0
        options.timeout = deadline.left
        bucket = flatten(tensors)
        called(lambda: self._group.broadcast([bucket], options).wait())

    def _drop(self) -> None:
        self._group = None
        del self._store


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors one after another, in host memory; without a copy where they lie
    there like that.
    """
    parts = [flat_bytes(tensor).cpu() for tensor in tensors]
    memory = parts[0].untyped_storage().data_ptr()
    size = 0
    for part in parts:
        in_place = part.data_ptr() == parts[0].data_ptr() + size
        if not in_place or part.untyped_storage().data_ptr() != memory:
            return torch.cat(parts)
        size += part.numel()
    return parts[0].as_strided((size,), (1,))


async def _all_or_first_error(*waits: Any) -> None:
    """Wait for all, or raise what the first of them raises."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
