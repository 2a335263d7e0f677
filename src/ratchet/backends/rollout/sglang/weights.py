"""A whole model, from the worker's staging memory into its servers (mode "relay").

Consumes the buckets that the worker received and verified, produces servers that generate with it.
Waits for the servers: to join the group, to take a bucket, to close their session; each up to
`timeout_s`. A server that refuses or dies ends the load with what it said, and the group with it.

From the first write on the engine holds no version until the load is proved.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from ratchet.backends.rollout.sglang.group import ServerGroup
from ratchet.backends.rollout.sglang.proving import ProvenWeights
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import TensorSpec
from ratchet.transport.weights.buckets import dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ratchet.backends.rollout.sglang.client import SGLangClient


_WORDS_S: Final = 5.0
"""For the servers to say why they did not take a bucket, once they wait for it no more."""


class RelayedWeights(ProvenWeights):
    """A `ProbedSink` in front of all servers of an engine."""

    def __init__(
        self,
        servers: Sequence[SGLangClient],
        sizes: Sequence[int],
        specs: Sequence[TensorSpec],
        *,
        host: str,
        tolerance: float,
        timeout_s: float,
    ) -> None:
        """Hold no version and no group yet.

        Args:
            servers: of one engine.
            sizes: how many tensor-parallel ranks each has.
            specs: of the model: a server ignores what it does not know, so this is what a transfer
                is checked against.
            host: address of this machine that the servers reach.
            tolerance: of the probe.
            timeout_s: of each wait for the servers.
        """
        super().__init__(servers, specs, tolerance=tolerance, timeout_s=timeout_s)
        self._sizes = tuple(sizes)
        self._host = host
        self._travels = {spec.name: spec for spec in specs if spec.alias_of is None}
        self._group: ServerGroup | None = None

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send one bucket to all servers; they hold no version until `stamp`.

        Raises:
            TransferFailed: if a server refuses it, is late or gone.
            WeightsMismatch: if a name, shape or dtype is not the model's; nothing was sent then,
                as a server ignores a name that it does not know.
        """
        self.version = None
        self._check_fit(tensors)
        # each offset is then a multiple of the item size, without gaps
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        try:
            if self.session.is_open:
                await self._send(ordered)
            else:
                await self._begin(ordered)
        except BaseException:
            await self.leave()
            raise

    async def leave(self) -> None:
        """Give the group up; the next load makes another one, and a session of its own."""
        self.session.is_open = False
        group, self._group = self._group, None
        if group is not None:
            await group.close()

    def _check_fit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            known = self._travels.get(name)
            if known is None:
                msg = f"the model has no {name}"
                raise WeightsMismatch(msg)
            if (dtype_name(tensor), tuple(tensor.shape)) != (known.dtype, known.shape):
                msg = (
                    f"{name} is {known.dtype} {known.shape} in the model, but"
                    f" {dtype_name(tensor)} {tuple(tensor.shape)} came"
                )
                raise WeightsMismatch(msg)

    async def _begin(self, first: Sequence[tuple[str, torch.Tensor]]) -> None:
        await self.session.begin()
        if self._group is not None:
            try:
                await self._send(first)
            except TransferFailed:  # a server was started again, and knows nothing of the group
                await self.leave()
        if self._group is None:
            self._group = ServerGroup(self.session.servers, self._sizes, self._host)
            await self._group.form(self.timeout_s)
            self.session.is_open = True
            await self._send(first)

    async def _send(self, ordered: Sequence[tuple[str, torch.Tensor]]) -> None:
        group = self._group
        if group is None:
            msg = "the group of the servers was given up"
            raise TransferFailed(msg)
        specs = [TensorSpec(name, dtype_name(t), tuple(t.shape)) for name, t in ordered]
        sent = group.send([tensor for _, tensor in ordered], self.timeout_s)
        taken = asyncio.ensure_future(
            self.session.update(specs, group.name, timeout_s=self.timeout_s)
        )
        both = (taken, sent)  # in the order of who knows more of what went wrong
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            if not all(each.done() for each in both):
                await self.leave()  # or one would wait for the other until its deadline
                await asyncio.wait([taken], timeout=_WORDS_S)
                taken.cancel()
            results = await asyncio.gather(*both, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
