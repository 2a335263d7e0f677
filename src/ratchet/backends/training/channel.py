"""What the ranks of a trainer tell each other about their calls.

Consumes the default process group; produces announcements from rank 0 to the others, and after each
call an agreement on how it went. A gloo group of its own carries both, as bytes in uint8 tensors,
so that they neither wait behind collectives of the model nor come between them.

Waits: a follower for the next announcement, and whoever has done its part of a call for the others,
for as long as they live, because rank 0 may wait long for a batch or write a large model; the death
of a peer closes its connections and ends both. Rank 0 waits no longer than `ANNOUNCE_S` for the
others to take an announcement and `AGREE_S` to have done as it did; a rank whose call failed waits
`FAILED_S` for the others to fail too.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ratchet.backends.training.commands import Command, decode, encode
from ratchet.errors import RunFailed

ANNOUNCE_S: Final = 60.0
"""The others are idle when rank 0 announces: one that does not listen is stopped or cut off."""
AGREE_S: Final = 600.0
"""As long as one collective of the model may take (`runtime.rank`)."""
FAILED_S: Final = 5.0
"""What fails on one rank alone leaves the others in a collective, which ends when it exits."""
VERDICT_BYTES: Final = 512

_FOREVER: Final = timedelta(days=365)


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
    """A `Channel` over torch.distributed. Every rank makes it at the same point."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._size = dist.get_world_size()
        self._group: Any = dist.new_group(backend="gloo", timeout=_FOREVER)

    def announce(self, command: Command) -> None:
        """Broadcast the length, then the bytes."""
        data = bytearray(encode(command))
        within = timedelta(seconds=ANNOUNCE_S)
        what = f"announcing {type(command).__name__} to the other ranks"
        self._broadcast(torch.tensor([len(data)]), within, what)
        self._broadcast(torch.frombuffer(data, dtype=torch.uint8), within, what)

    def receive(self) -> Command:
        """Take the length, then the bytes."""
        what = "waiting for rank 0"
        length = torch.zeros(1, dtype=torch.int64)
        self._broadcast(length, _FOREVER, what)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(data, timedelta(seconds=ANNOUNCE_S), what)
        return decode(data.numpy().data)

    def agree(self, mine: Verdict) -> list[Verdict]:
        """Gather everybody's verdict."""
        text = mine.text.encode().ljust(VERDICT_BYTES, b"\0")
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every = [torch.empty_like(own) for _ in range(self._size)]
        work = dist.all_gather(every, own, group=self._group, async_op=True)
        _wait(work, self._patience(mine), "hearing how the call went on the other ranks")
        return [Verdict(bytes(each.numpy()).rstrip(b"\0").decode()) for each in every]

    def _patience(self, mine: Verdict) -> timedelta:
        if mine.text:
            return timedelta(seconds=FAILED_S)
        return _FOREVER if self.rank else timedelta(seconds=AGREE_S)

    def _broadcast(self, data: torch.Tensor, within: timedelta, what: str) -> None:
        work = dist.broadcast(data, src=0, group=self._group, async_op=True)
        _wait(work, within, what)


def _wait(work: Any, within: timedelta, what: str) -> None:
    try:
        work.wait(within)
    except RuntimeError as error:
        text = str(error).partition("] ")[2] or str(error)
        msg = f"a rank of the trainer was lost while {what}: {text.partition('. This')[0]}"
        raise RunFailed(msg) from None
