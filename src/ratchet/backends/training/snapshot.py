"""Copies of the weights in training, for a sender that reads while the next steps are taken.

Consumes a `WeightSource`, the model of a training backend; produces another one, which reads what
was copied. Waits for the source while it copies: on several ranks `read` is a collective, which
stands in line with the backend's other calls, and only rank 0 keeps what comes out of it.

At most two copies live: the newest, and the one that is being read. In step they are one, written
over and over; the second comes with a step that is faster than the transfer before it, and goes
with the end of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Final, NamedTuple

import torch

from ratchet.transport.weights.base import TensorSpec, WeightSource
from ratchet.types import PolicyVersion

_CHUNK_BYTES: Final = 256 * 2**20
"""Read at once: on several ranks it exists whole for so long."""


class _Copy(NamedTuple):
    version: PolicyVersion
    tensors: dict[str, torch.Tensor]


class Snapshot:
    """A `WeightSource`, and the `WeightSnapshot` of a trainer. Lives on the event loop; `read` may
    be called from any thread.
    """

    def __init__(self, source: WeightSource, *, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._source = source
        self._chunk_bytes = chunk_bytes
        self._newest: _Copy | None = None
        self._reading: _Copy | None = None

    async def take(self, version: PolicyVersion) -> None:
        """Copy the weights, off the event loop; they must not change meanwhile."""
        old, self._newest = self._newest, None
        tensors = {} if old is None or old is self._reading else old.tensors
        await asyncio.to_thread(self._copy, tensors)
        self._newest = _Copy(version, tensors)

    @contextmanager
    def reading(self, version: PolicyVersion) -> Iterator[None]:
        """Let `read` return this version, and keep it for so long.

        Raises:
            RuntimeError: if it is not the newest, or another one is being read.
        """
        copy = self._newest
        if copy is None or copy.version != version or self._reading is not None:
            msg = f"version {version} is not there to be read: {self}"
            raise RuntimeError(msg)
        self._reading = copy
        try:
            yield
        finally:
            self._reading = None

    def specs(self) -> Sequence[TensorSpec]:
        """Describe every parameter, as the source does."""
        return self._source.specs()

    def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Return the copies of the version that is being read.

        Raises:
            RuntimeError: if there is none.
        """
        reading = self._reading
        if reading is None:
            msg = f"no version is being read: {self}"
            raise RuntimeError(msg)
        return [reading.tensors[name] for name in names]

    def __repr__(self) -> str:
        newest, reading = (each and each.version for each in (self._newest, self._reading))
        return f"Snapshot(newest={newest}, reading={reading})"

    # --- on a thread

    def _copy(self, tensors: dict[str, torch.Tensor]) -> None:
        for names in self._chunks():
            for name, tensor in zip(names, self._source.read(names), strict=True):
                if name not in tensors:
                    tensors[name] = torch.empty(
                        tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
                    )
                tensors[name].copy_(tensor)

    def _chunks(self) -> Iterator[list[str]]:
        """Yield the names that travel, in order, in chunks of about `chunk_bytes`."""
        names: list[str] = []
        size = 0
        for spec in self._source.specs():
            if spec.alias_of is not None:
                continue
            dtype: torch.dtype = getattr(torch, spec.dtype)
            names.append(spec.name)
            size += prod(spec.shape) * dtype.itemsize
            if size >= self._chunk_bytes:
                yield names
                names, size = [], 0
        if names:
            yield names
