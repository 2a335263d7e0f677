"""What the ranks of a trainer tell each other about their calls.

Consumes the default process group; produces announcements from rank 0 to the others, and after each
call an agreement on how it went. A gloo group of its own carries both, as bytes in uint8 tensors,
so that they neither wait behind collectives of the model nor come between them.

Waits: a follower for the next announcement, and whoever has done its part of a call for the others,
for as long as they live, because rank 0 may wait long for a batch or write a large model; the death
of a peer closes its connections and ends both. Rank 0 waits no longer than `ANNOUNCE_S` for the
others to take an announcement and `COLLECTIVE_S` for them to have done their part; a rank whose
call failed waits `FAILED_S` for the others to fail too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from ratchet.backends.training.commands import Command, decode, encode
from ratchet.errors import RunFailed

T = TypeVar("T")

COLLECTIVE_S: Final = 600.0
"""What one rank may take longer than another for its part of a call; also the time limit that the
default process group is to have.
"""
ANNOUNCE_S: Final = 60.0
"""The others are idle when rank 0 announces: one that does not listen is stopped or cut off."""
FAILED_S: Final = 5.0
"""What fails on one rank alone leaves the others in a collective, which ends when it exits."""
VERDICT_BYTES: Final = 512
LOST_RANK: Final = "a rank of the trainer was lost"
"""What the error of a rank says that misses another."""

_FOREVER_S: Final = 30 * 86400.0
_c10d: Final[Any] = _distributed_c10d
"""torch's stubs know neither the options nor their fields."""
_SOURCE: Final = re.compile(r"^\[[^]]*\]\s*")


class Verdict(NamedTuple):
    """How a call went on one rank: the error in words, empty if there was none."""

    text: str

    @classmethod
    def of(cls, error: BaseException | None) -> Verdict:
        """Name the error, as much of it as travels."""
        if error is None:
            return cls("")
        text = f"{type(error).__name__}: {error}".encode()[:VERDICT_BYTES]
        return cls(text.decode(errors="ignore"))


class Channel(Protocol):
    """Between rank 0 and the others."""

    rank: int

    def announce(self, command: Command) -> None:
        """Tell every other rank what comes next (rank 0).

        Raises:
            RunFailed: if one of them is lost, or does not listen.
        """
        ...

    def receive(self) -> Command:
        """Wait for what comes next (all others).

        Raises:
            RunFailed: if rank 0 is lost.
        """
        ...

    def agree(self, mine: Verdict) -> list[Verdict]:
        """Exchange how the call went; return every rank's verdict, by rank.

        Raises:
            RunFailed: if a rank is lost, or does not come in time.
        """
        ...


class GlooChannel:
    """A `Channel` over torch.distributed. It opens with its first use, which waits for all ranks;
    until then nothing blocks, so that an event loop may make it.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._size = dist.get_world_size()
        self._group: Any = None

    def announce(self, command: Command) -> None:
        """Broadcast the length, then the bytes."""
        data = bytearray(encode(command))
        what = f"it was told of {type(command).__name__}"
        self._broadcast(torch.tensor([len(data)]), ANNOUNCE_S, what)
        self._broadcast(torch.frombuffer(data, dtype=torch.uint8), ANNOUNCE_S, what)

    def receive(self) -> Command:
        """Take the length, then the bytes."""
        what = "this one waited for a call"
        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length, _FOREVER_S, what)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(data, ANNOUNCE_S, what)
        return decode(data.numpy().data)

    def agree(self, mine: Verdict) -> list[Verdict]:
        """Gather everybody's verdict."""
        text = mine.text.encode().ljust(VERDICT_BYTES, b"\0")
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self._size)]
        options = _c10d.AllgatherOptions()
        options.timeout = timedelta(seconds=self._patience_s(mine))
        group = self._opened()
        _called(
            lambda: group.allgather([every], [own], options).wait(),
            "the ranks told each other how a call went",
        )
        return [Verdict(bytes(each.numpy()).rstrip(b"\0").decode()) for each in every]

    def _patience_s(self, mine: Verdict) -> float:
        if mine.text:
            return FAILED_S
        return _FOREVER_S if self.rank else COLLECTIVE_S

    def _broadcast(self, data: torch.Tensor, within_s: float, what: str) -> None:
        options = _c10d.BroadcastOptions()
        options.rootRank = 0
        options.timeout = timedelta(seconds=within_s)
        group = self._opened()
        _called(lambda: group.broadcast([data], options).wait(), what)

    def _opened(self) -> Any:
        if self._group is None:
            within = timedelta(seconds=COLLECTIVE_S)
            self._group = _called(
                lambda: dist.new_group(backend="gloo", timeout=within), "the ranks met"
            )
        return self._group


def _called(call: Callable[[], T], what: str) -> T:
    try:
        return call()
    except RuntimeError as error:
        text = _SOURCE.sub("", str(error)).partition(". This")[0]
        msg = f"{LOST_RANK} while {what}: {text}"
        raise RunFailed(msg) from None
