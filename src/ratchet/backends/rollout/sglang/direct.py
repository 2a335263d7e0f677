"""A whole model, from the trainer straight into the servers of an engine (mode "direct").

Consumes groups that the trainer forms and buckets that it sends, produces servers that generate
with them; the worker only says when. Waits for each server up to the deadline that the transfer
gives. The servers have the trainer's bytes in their models as they arrive, so from the first bucket
on the engine holds no version until the load is proved.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from ratchet.backends.rollout.sglang.client import (
    CallFailed,
    CallRefused,
    ServerGone,
    TooLate,
)
from ratchet.backends.rollout.sglang.proving import ProvenWeights
from ratchet.backends.rollout.sglang.session import LEAVE_S, UpdateSession
from ratchet.errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from ratchet.backends.rollout.sglang.client import SGLangClient
    from ratchet.transport.weights.base import TensorSpec
    from ratchet.transport.weights.outside import Meeting
    from ratchet.types import TensorSlot


class DirectWeights(ProvenWeights):
    """A `DirectSink`, and the servers behind it."""

    def __init__(
        self,
        servers: Sequence[SGLangClient],
        sizes: Sequence[int],
        specs: Sequence[TensorSpec],
        *,
        hold: Callable[[], None],
        lost: Callable[[str], None],
        tolerance: float,
        timeout_s: float,
    ) -> None:
        """Hold no version yet.

        Args:
            servers: of one engine.
            sizes: how many tensor-parallel ranks each has.
            specs: of the model: a server ignores what it does not know, so this is what a transfer
                is checked against.
            hold: called before the first bucket of a version.
            lost: called with the reason when a server does not answer any more.
            tolerance: of the probe.
            timeout_s: of each wait for the servers outside a transfer.
        """
        super().__init__(servers, specs, tolerance=tolerance, timeout_s=timeout_s)
        self.sizes = tuple(sizes)
        self._hold = hold
        self._lost = lost
        self._stuck: dict[int, float] = {}
        """servers that did not leave a group, and since when"""

    @property
    def outside(self) -> DirectWeights:
        """The servers."""
        return self

    # --- `OutsideServers`

    async def join(self, server: int, meeting: Meeting, timeout_s: float) -> None:
        """Have all ranks of a server join a group; returns when they have met the trainer.

        Raises:
            TransferFailed: if the server refuses, is late or gone.
        """
        try:
            await self.session.servers[server].init_group(
                address=meeting.host,
                port=meeting.port,
                rank_offset=1,
                world_size=meeting.world_size,
                name=meeting.group,
                backend=meeting.backend,
                timeout_s=timeout_s,
            )
        except CallFailed as error:
            raise TransferFailed(str(error)) from None

    async def begin(self) -> None:
        """Open an update session on every server, all of them paused."""
        self._hold()
        self.version = None
        await self.session.begin()

    async def load(
        self, server: int, group: str, slots: Sequence[TensorSlot], timeout_s: float
    ) -> None:
        """Have a server take one flattened bucket."""
        one = UpdateSession(self.session.servers[server : server + 1])
        await one.update(slots, group, timeout_s=timeout_s)

    async def release(self, server: int, group: str) -> None:
        """Have a server leave a group. One that is gone or was started again is in none.

        Raises:
            TransferFailed: if the server does not answer.
        """
        client = self.session.servers[server]
        try:
            async with asyncio.timeout(LEAVE_S):
                await client.destroy_group(group)
        except (CallRefused, ServerGone):
            pass
        except (TimeoutError, TooLate):
            # it waits for the trainer, which may yet drop the group, or for ever
            msg = f"the SGLang server at {client.url} hangs: it does not leave a group that broke"
            now = asyncio.get_running_loop().time()
            if now - self._stuck.setdefault(server, now) > self.timeout_s:
                self._lost(msg)
            raise TransferFailed(msg) from None
        self._stuck.pop(server, None)

    # --- `ProvenWeights`

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> NoReturn:
        """Raise `TransferFailed`: nothing passes through the worker."""
        msg = (
            f"{', '.join(tensors)} came to the worker, and its servers take weights from the"
            ' trainer: the trainer\'s rollout.sglang.transfer is not "direct"'
        )
        raise TransferFailed(msg)
