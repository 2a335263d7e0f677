"""The protocols of weight sync: what a trainer offers, what an engine takes, and the two ends of a
transport.

A transfer: the trainer plans a manifest and a route for each engine (`WeightSender.plan`), asks
each engine to `LoadWeights`, and sends the buckets (`WeightSender.send`). Each engine joins by its
route, receives into staging memory, and finalizes in one function for all transports
(`finalize.py`): verify, stamp, resume. Digests follow the buckets, so that nothing has to be
gathered twice. This file imports no torch at run time: actors use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from ratchet.types import (
    PauseMode,
    PolicyVersion,
    Term,
    WeightManifest,
    WeightProbe,
    WeightRoute,
)

if TYPE_CHECKING:
    import torch


class TensorSpec(NamedTuple):
    """A parameter as its owner describes it."""

    name: str
    dtype: str
    """torch name without the prefix"""
    shape: tuple[int, ...]
    alias_of: str | None = None
    """the name that travels, when this one is tied to it"""


class WeightSource(Protocol):
    """The trainer's model, as the sending end sees it. Between two optimiser steps its values do
    not change.
    """

    def specs(self) -> Sequence[TensorSpec]:
        """Describe every parameter, tied ones included, in a fixed order."""
        ...

    def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Return the full, current tensors. On several ranks this is a collective; only rank 0 uses
        the result.
        """
        ...


class WeightSink(Protocol):
    """An engine, as the receiving end sees it."""

    @property
    def version(self) -> PolicyVersion | None:
        """The version that generates now; None before the first load and after a failed one
        (quarantined).
        """
        ...

    def specs(self) -> Sequence[TensorSpec]:
        """Describe every parameter that the engine needs, tied ones included."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two tokens; requests stay in flight. Idempotent."""
        ...

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put values into the model, which is quarantined from the first write until `stamp`."""
        ...

    async def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Return the values that the engine generates with, for verification."""
        ...

    async def stamp(self, version: PolicyVersion) -> None:
        """Declare the weights whole: from the next token on, `version` generates.

        Raises:
            WeightsMismatch: from a `ProbedSink`.
        """
        ...

    async def resume(self) -> None:
        """Go on generating; without a version (quarantined), requests wait. Idempotent."""
        ...


@runtime_checkable
class AdoptingSink(WeightSink, Protocol):
    """An engine that can generate with tensors that it is given, without a copy."""

    @property
    def adopts(self) -> torch.device | None:
        """Where they must be; None if it cannot."""
        ...

    async def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put these tensors themselves in the place of all of the engine's own, which are not used
        any more when this returns; quarantined until `stamp`.
        """
        ...


@runtime_checkable
class ProbedSink(WeightSink, Protocol):
    """An engine whose weights cannot be read back: `read` raises `WeightsMismatch`. What it
    computes with them proves them, in `stamp`.
    """

    def expect(self, probe: WeightProbe | None) -> None:
        """Take what the trainer's model computes with the weights to come. The next `stamp` raises
        `WeightsMismatch` if the engine computes something else; with None it takes them on trust.
        """
        ...


class SendReport(NamedTuple):
    """What a sender did; seconds are of its own clock."""

    digest: str
    """xxh3-128 over the bucket digests, hex"""
    num_bytes: int
    num_buckets: int
    gather_s: float
    move_s: float
    lost: Mapping[str, str] = {}
    """engines, as they were planned, that did not get everything, and why"""
    shared: Sequence[str] = ()
    """engines that were to take it from shared memory, on this host"""
    not_shared: str = ""
    """why engines on this host that could were sent it as the others are, if they were"""


class LoadReport(NamedTuple):
    """What a receiver did."""

    digest: str
    move_s: float
    load_s: float
    paused_s: float


class WeightSender(Protocol):
    """The trainer's end of a transport."""

    def plan(
        self,
        term: Term,
        version: PolicyVersion,
        step: int,
        engines: Sequence[str],
        *,
        catch_up: bool = False,
    ) -> tuple[WeightManifest, Mapping[str, WeightRoute]]:
        """Plan one transfer to these engines (name and incarnation joined by "/"); a changed
        membership gets a new group. To catch up is to go point to point, whatever the transport:
        the group of the others stays as it is.
        """
        ...

    async def send(self, manifest: WeightManifest) -> SendReport:
        """Send the planned transfer.

        Raises:
            TransferFailed: if no engine got everything. Where some did, the report names the
            others, and the next plan makes a new group.
        """
        ...

    def leave(self, engine: str, reason: str) -> None:
        """Wait for this engine no longer: it is dead, or it refused. Called while `send` runs, as
        the engine was planned; harmless otherwise, and when told twice.
        """
        ...

    async def close(self) -> None:
        """Give up the group and the store."""
        ...


class WeightReceiver(Protocol):
    """An engine's end of a transport."""

    async def receive(
        self, manifest: WeightManifest, route: WeightRoute, sink: WeightSink, mode: PauseMode
    ) -> LoadReport:
        """Take a version into the sink. Whatever happens, the sink is resumed; only a whole,
        verified version is stamped.

        Raises:
            TransferFailed: if the transfer ended early, timed out, or was aborted.
            WeightsMismatch: if names, shapes or digests differ; the text names them.
        """
        ...

    def abort(self, reason: str) -> None:
        """Make a pending `receive` raise `TransferFailed` now. Harmless when there is none."""
        ...

    async def close(self) -> None:
        """Leave the group."""
        ...
