"""Groups whose other members are processes of another program: the tensor-parallel ranks of an
inference server, which its engine's worker asks to join.

Consumes a name and the sizes of the servers, produces one group for each server, which move every
bucket together. One each, as a member that is lost takes its group with it, and with NCCL the
processes of that group too. Waits for the servers one after another, as their worker asks them, so
that none is left waiting for another; unblocked by the deadline.

Such a member connects to the trainer's store as torch's own rendezvous does, looks for keys below
the prefixes that torch's helper for groups gives them, and takes broadcasts only: the bytes of some
tensors, one behind the other without a gap (`stretches_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

import torch
from torch import distributed as dist

from ratchet.errors import TransferFailed
from ratchet.transport.weights.base import WeightSink
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.groups import GlooGroup, Group, NcclGroup
from ratchet.types import TensorSlot

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_c10d: Final[Any] = dist
"""torch's stubs and its own process groups disagree."""

DEVICES: Final = {"gloo": "cpu/", "nccl": "cuda/"}
"""What torch's helper calls the first device of a backend, as a prefix."""


class Meeting(NamedTuple):
    """Where and as whom the ranks of a server join a group: behind the trainer, which is rank 0."""

    host: str
    port: int
    """of the trainer's store"""
    group: str
    world_size: int
    backend: str


class OutsideServers(Protocol):
    """The servers of an engine, as a transfer sees them. What fails raises `TransferFailed`."""

    @property
    def sizes(self) -> Sequence[int]:
        """How many ranks each has."""
        ...

    async def join(self, server: int, meeting: Meeting, timeout_s: float) -> None:
        """Have all ranks of a server join a group; returns when they have met the trainer."""
        ...

    async def begin(self) -> None:
        """Prepare the servers for buckets. From here on the engine is quarantined."""
        ...

    async def load(
        self, server: int, group: str, slots: Sequence[TensorSlot], timeout_s: float
    ) -> None:
        """Have a server take one broadcast: these tensors, one behind the other."""
        ...

    async def release(self, server: int, group: str) -> None:
        """Have a server leave a group, which may be broken, or unknown to it."""
        ...


@runtime_checkable
class DirectSink(WeightSink, Protocol):
    """An engine whose servers can take part in the place of its worker. The servers load what
    `write` would, and `stamp` proves what they hold.
    """

    @property
    def outside(self) -> OutsideServers | None:
        """The servers; None if they cannot."""
        ...


class Stretch(NamedTuple):
    """Tensors of a bucket that lie in a row: the bytes [start, end)."""

    start: int
    end: int
    slots: tuple[TensorSlot, ...]


def stretches_of(slots: Sequence[TensorSlot]) -> tuple[Stretch, ...]:
    """Return the stretches of a bucket: as few as there can be, one where no tensor's end needs to
    be aligned. Empty tensors are in none, as there is nothing to load.

    Args:
        slots: of the bucket, by offset.
    """
    stretches: list[Stretch] = []
    for slot in slots:
        end = slot.offset + slot.num_bytes
        if not slot.num_bytes:
            continue
        if stretches and stretches[-1].end == slot.offset:
            stretches[-1] = Stretch(stretches[-1].start, end, (*stretches[-1].slots, slot))
        else:
            stretches.append(Stretch(slot.offset, end, (slot,)))
    return tuple(stretches)


def group_of(name: str, server: int) -> str:
    """Return the name of the group of one server."""
    return f"{name}.{server}"


def server_store(store: Store, group: str) -> Any:
    """Return a store as the ranks of a server use it for a group: under the prefix of their own
    function, and under that of torch's helper for groups.
    """
    return _c10d.PrefixStore(f"{group}/", _c10d.PrefixStore(group, store))


class OutsideGroup:
    """The groups of all servers of one engine, at the trainer's end."""

    def __init__(
        self,
        store: Store,
        name: str,
        sizes: Sequence[int],
        *,
        backend: str,
        address: str,
        device: torch.device,
        deadline: Deadline,
    ) -> None:
        """Wait for the servers.

        Args:
            store: the trainer's, or a client of it.
            name: never used before.
            sizes: how many ranks each server brings.
            backend: "gloo" or "nccl".
            address: of this end, for gloo.
            device: of this end, for NCCL.
            deadline: for all of them together.

        Raises:
            TransferFailed: if one did not come.
        """
        self.name = name
        self._groups: list[Group] = []
        own: dict[str, Any] = {"device": device} if backend == "nccl" else {"address": address}
        own |= {"deadline": deadline, "outside": True}
        kind: Callable[..., Group] = NcclGroup if backend == "nccl" else GlooGroup
        try:
            for server, size in enumerate(sizes):
                group = group_of(name, server)
                self._groups.append(
                    kind(server_store(store, group), DEVICES[backend], 0, size + 1, **own)
                )
        except TransferFailed:
            self.close()
            raise
        self.device = self._groups[0].device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return memory that all of them can move."""
        return self._groups[0].allocate(num_bytes)

    def move(self, data: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """Start to move `data` to every server."""
        waits = [group.move(data, deadline) for group in self._groups]

        def wait() -> None:
            for each in waits:
                each()

        return wait

    def close(self) -> None:
        """Drop the groups."""
        for group in self._groups:
            group.close()
        self._groups.clear()
