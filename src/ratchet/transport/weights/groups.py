"""Process groups of a transport's own, outside torch's default group.

Consumes a store, a name, a rank and a size, produces a group that moves bytes from rank 0 to all
others: it broadcasts, and between two it sends and receives. A group waits for its members, until
its deadline at the latest; nothing else unblocks gloo (torch 2.13: neither `abort` nor `shutdown`
ends an operation that waits), except that a peer goes: dropping a group closes its connections, and
every member that still waits on it raises at once. So nothing here keeps a group alive by accident:
not an exception's traceback, not a pending operation.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import torch
from torch import distributed as dist

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store

T = TypeVar("T")
_c10d: Final[Any] = dist
"""torch's stubs and its own process groups disagree."""

_cuda: Final[Any] = torch.cuda
_PATH: Final = re.compile(r"^\[[^]]*\]\s*")

_CONNECT: Final = timedelta(seconds=2)
"""For gloo to connect, at least; it takes five times as long before it gives up."""

_PAIR: Final = 2
_STREAMS: Final = 2
"""Connections between two members of a group of our own, which pieces take in turns. gloo has a
thread for each, at either end, and one alone is what bounds a transfer on a host that has cores to
spare."""


class Group(Protocol):
    """A process group with rank 0 as the root of everything."""

    name: str
    device: torch.device
    """where its memory is"""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor in memory that the group can move."""
        ...

    def move(self, data: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """Start to move `data` from rank 0 to all; the result waits for the end of it. Results are
        waited for in order.

        Raises:
            TransferFailed: from the result, if a member was lost or the deadline passed.
        """
        ...

    def close(self) -> None:
        """Drop the group and its connections."""
        ...


class GlooGroup:
    """Host memory over TCP, on one address only."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        *,
        address: str,
        deadline: Deadline,
        outside: bool = False,
    ) -> None:
        """Wait for the members; `outside` ones are of another program, and only broadcast.

        gloo's thread calls a connection that was freed, and the process crashes, if a member
        connects in the moment in which this end has given it up. So members wait for each other in
        the store, and then have time to connect, whatever the deadline. Outside members cannot say
        that they are there.
        """
        self.name = name
        self.device = torch.device("cpu")
        if not outside:
            called(partial(_wait_for_members, store, name, rank, size, deadline))
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = max(deadline.left, _CONNECT)
        options._devices = [
            _c10d.ProcessGroupGloo.create_device(hostname=address)
            for _ in range(1 if outside else _STREAMS)
        ]
        self._works: list[Any] = []
        self._tags = cycle(range(_STREAMS))
        self._rank = rank
        self._is_pair = size == _PAIR and not outside
        self._group: Any = called(
            lambda: _c10d.ProcessGroupGloo(_c10d.PrefixStore(name, store), rank, size, options)
        )

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeros in host memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def move(self, data: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """Start to move `data`."""
        tag = next(self._tags)
        self._works.append(
            called(partial(_start, self._group, self._rank, self._is_pair, data, deadline, tag))
        )
        # popped, so that no frame of a traceback holds the operation, which holds the group
        if self._is_pair:
            return lambda: called(lambda: self._works.pop(0).wait(deadline.left))
        return lambda: called(lambda: self._works.pop(0).wait())

    def close(self) -> None:
        """Drop the group and what it has begun."""
        self._works.clear()
        self._group = None


class NcclGroup:
    """Device memory over NCCL, on a stream of its own beside the computation."""

    _POLL_S: Final = 0.0005
    _NEVER: Final = timedelta(days=30)
    """The deadline is kept here; torch's own watchdog would end the process."""

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        size: int,
        *,
        device: torch.device,
        deadline: Deadline,
        outside: bool = False,
    ) -> None:
        """Wait for the members; `outside` ones are of another program: they only broadcast, and
        come with the first bucket.
        """
        self.name = name
        self._rank = rank
        self._is_pair = size == _PAIR and not outside
        self.device = device
        _cuda.set_device(device)  # of this thread; a new one has the first device
        self._stream = _cuda.Stream(device)
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = self._NEVER
        with _no_watchdog():
            self._group: Any = called(
                lambda: _c10d.ProcessGroupNCCL(_c10d.PrefixStore(name, store), rank, size, options)
            )
        if outside:
            return
        try:  # NCCL connects with its first operation, which may take long
            self.move(self.allocate(1), deadline)()
        except TransferFailed:
            self.close()
            raise

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeros on the device."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def move(self, data: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """Start to move `data` on the side stream, after what this thread has queued."""
        group = self._group
        if group is None:
            msg = "the process group is closed"
            raise TransferFailed(msg)
        start = partial(_start, group, self._rank, self._is_pair, data, None)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        done = _cuda.Event()
        with torch.cuda.stream(self._stream):
            called(lambda: start().wait())  # orders the stream only
            done.record(self._stream)

        def wait() -> None:
            while not called(done.query):
                if not deadline.left_s:
                    self.close()
                    msg = f"a bucket took longer than {deadline.timeout_s:g} s"
                    raise TransferFailed(msg)
                time.sleep(self._POLL_S)

        return wait

    def close(self) -> None:
        """Abort what runs, on this end, and drop the group."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


def _wait_for_members(store: Store, name: str, rank: int, size: int, deadline: Deadline) -> None:
    here = [f"{name}.here/{each}" for each in range(size)]
    store.set(here[rank], "")
    store.wait(here, deadline.left)


def _start(
    group: Any,
    rank: int,
    is_pair: bool,
    data: torch.Tensor,
    deadline: Deadline | None,
    tag: int = 0,
) -> Any:
    """Start the operation: between two a send and a receive, else a broadcast. By the tag gloo
    chooses the stream of the former; broadcasts take them in turns by themselves.
    """
    if is_pair:
        return group.recv([data], 0, tag) if rank else group.send([data], 1, tag)
    options = _c10d.BroadcastOptions()
    options.rootRank = 0
    if deadline is not None:
        options.timeout = deadline.left
    return group.broadcast([data], options)


@contextmanager
def _no_watchdog() -> Iterator[None]:
    """Build a group for which torch does not end the process when a peer is lost: that is an error
    here, and training goes on. The variable is read once, by the group's constructor.
    """
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def check_backend(backend: str) -> None:
    """Return if this process can use a backend.

    Raises:
        TransferFailed: if not; the text says what is missing.
    """
    if backend == "nccl" and not _has_nccl():
        msg = 'NCCL needs a CUDA device and a torch built with NCCL; use "gloo" or "auto"'
        raise TransferFailed(msg)


def choose_backend(configured: str, num_engines: int) -> str:
    """Return "gloo" or "nccl". "auto" takes NCCL where every member can have a device of its own,
    which NCCL demands.
    """
    if configured != "auto":
        return configured
    return "nccl" if _has_nccl() and torch.cuda.device_count() > num_engines else "gloo"


def device_of(backend: str) -> torch.device:
    """Return the device whose memory a backend moves: for NCCL the calling thread's."""
    if backend == "nccl" and _has_nccl():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def called(call: Callable[[], T]) -> T:
    """Turn torch's errors into ours, without their traceback, which would keep the group alive."""
    try:
        return call()
    except RuntimeError as error:
        text = _PATH.sub("", str(error)).partition(". This")[0].splitlines()[0]
    del call  # this frame is in the traceback, and the call may hold the group
    raise TransferFailed(text)
