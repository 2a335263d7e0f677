"""An update session on all servers of an engine at once.

Consumes the steps of a weight load, produces the same calls on every server. Waits for all of them,
each up to its client's deadline: one that fails ends nothing for the others, and is named in the
error. What a server refuses is an error here, a flush too.

The prefix cache holds keys and values that older weights made. In mode "retract" nothing runs, so
the servers flush it, and one that refuses would continue on them. In mode "in_place" what runs goes
on with its own keys and values, by definition, and a server refuses to flush under it; there each
version's requests have a cache of their own (`extra_key`), so that none begins on another's.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from ratchet.backends.rollout.sglang.client import CallFailed, CallRefused, TooLate
from ratchet.errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ratchet.backends.rollout.sglang.client import SGLangClient
    from ratchet.transport.weights.base import TensorSpec
    from ratchet.types import PauseMode, PolicyVersion, TensorSlot

T = TypeVar("T")

LEAVE_S: Final = 5.0
"""For a server to leave a group or to forget an adapter that an engine gives up; it may be dead."""

FLATTENED: Final = "flattened_bucket"
"""One broadcast of uint8: the tensors of a call one after another, in the order of their names,
without gaps. The offset of each must be a multiple of its item size."""


class UpdateSession:
    """Calls of control; each raises `TransferFailed`, which names the servers that failed."""

    def __init__(self, servers: Sequence[SGLangClient]) -> None:
        self.servers = tuple(servers)
        self.is_open = False
        """from `begin` to `end`, as far as this end knows"""
        self._overlaps: bool | None = None

    async def overlaps(self) -> bool:
        """Return whether a server prepares a step while the one before it runs, as it does unless
        it was started with --disable-overlap-schedule.
        """
        if self._overlaps is None:
            infos = await ask_all(self.servers, lambda server: server.server_info())
            self._overlaps = not all(info.get("disable_overlap_schedule") for info in infos)
        return self._overlaps

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two tokens. Idempotent."""
        await self._all(lambda server: server.pause(mode))

    async def resume(self) -> None:
        """Go on. Idempotent."""
        await self._all(lambda server: server.resume())

    async def begin(self) -> None:
        """Open a session; one that a load left open when it failed is closed first. Paused servers
        do this at once, others when what runs has ended.
        """
        await self._all(_begin)
        self.is_open = True

    async def update(
        self, tensors: Sequence[TensorSpec | TensorSlot], group: str, *, timeout_s: float
    ) -> None:
        """Receive one flattened bucket from rank 0 of a process group, which all servers joined.

        A server ignores a name that it does not know, and says nothing of it: check them before.
        Neither version nor cache change with this call.

        Args:
            tensors: what the bucket holds, in this order.
            group: name of the process group.
            timeout_s: until it has arrived and is written.
        """
        await self._all(
            lambda server: server.update_from_group(
                names=[each.name for each in tensors],
                dtypes=[each.dtype for each in tensors],
                shapes=[each.shape for each in tensors],
                group=group,
                load_format=FLATTENED,
                timeout_s=timeout_s,
            )
        )

    async def end(self) -> None:
        """Close the session, if there is one; the servers finish what they derive from weights."""
        if self.is_open:
            self.is_open = False
            await self._all(lambda server: server.end_update())

    async def flush(self) -> None:
        """Empty the prefix cache."""
        await self._all(lambda server: server.flush_cache())

    async def set_version(self, version: PolicyVersion) -> None:
        """Name the weights in every answer from here on. What is in flight goes on."""
        await self._all(lambda server: server.set_version(str(version)))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a directory, beside those that are loaded."""
        await self._all(lambda server: server.load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        """Forget a LoRA adapter, as soon as no request uses it; waits for that, however long."""
        await self._all(partial(_unload, name=name))

    async def _all(self, call: Callable[[SGLangClient], Awaitable[None]]) -> None:
        await ask_all(self.servers, call)


async def ask_all(
    servers: Sequence[SGLangClient], call: Callable[[SGLangClient], Awaitable[T]]
) -> list[T]:
    """Return what each server answers to a call; none is left running for nobody.

    Raises:
        TransferFailed: names every server that failed.
    """
    results = await asyncio.gather(*(call(server) for server in servers), return_exceptions=True)
    answers: list[T] = []
    failed: list[CallFailed] = []
    for result in results:
        if isinstance(result, CallFailed):
            failed.append(result)
        elif isinstance(result, BaseException):
            raise result
        else:
            answers.append(result)
    if failed:
        raise TransferFailed("; ".join(map(str, failed)))
    return answers


async def _unload(server: SGLangClient, name: str) -> None:
    while True:
        try:
            return await server.unload_adapter(name)
        except TooLate:  # it takes no new requests for it any more, and may be asked again
            continue


async def _begin(server: SGLangClient) -> None:
    try:
        await server.begin_update()
    except CallRefused as error:
        if "already open" not in error.text:
            raise
        await server.end_update()
        await server.begin_update()
