"""Process groups of a transport's own, outside torch's default group, and the store they meet at.

Consumes a name, a rank and a size, produces a group that broadcasts from rank 0. A group waits for
its members, until its deadline at the latest; nothing else unblocks gloo (torch 2.13: neither
`abort` nor `shutdown` ends an operation that waits), except that a peer goes: dropping a group
closes its connections, and every member that still waits on it raises at once. So nothing here
keeps a group alive by accident: not an exception's traceback, not a pending operation.
"""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import torch
from torch import distributed as dist

from ratchet.errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch._C._distributed_c10d import Store, TCPStore

T = TypeVar("T")
_c10d: Final[Any] = dist
"""torch's stubs and its own process groups disagree."""

_cuda: Final[Any] = torch.cuda
_PATH: Final = re.compile(r"^\[[^]]*\]\s*")


_CONNECT: Final = timedelta(seconds=1)
"""One try to connect to a store, after which it is asked again whether anybody listens."""


class Deadline:
    """One point in time for all the waits of a transfer."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    @property
    def left(self) -> timedelta:
        """Time left; at least a millisecond, as torch takes zero for "no limit"."""
        return timedelta(seconds=max(self.left_s, 0.001))


class Group(Protocol):
    """A process group with rank 0 as the root of everything."""

    name: str

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return a uint8 tensor in memory that the group can move."""
        ...

    def broadcast(self, data: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """Start to move `data` from rank 0 to all; the result waits for the end of it.

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
    ) -> None:
        self.name = name
        options = _c10d.ProcessGroupGloo._Options()
        options._timeout = deadline.left
        options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=address)]
        self._works: list[Any] = []
        self._group: Any = called(
            lambda: _c10d.ProcessGroupGloo(_c10d.PrefixStore(name, store), rank, size, options)
        )

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeros in host memory."""
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def broadcast(self, data: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """Start to move `data`."""
        options = _c10d.BroadcastOptions()
        options.rootRank = 0
        options.timeout = deadline.left
        self._works.append(called(lambda: self._group.broadcast([data], options)))
        # popped, so that no frame of a traceback holds the operation, which holds the group
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
        self, store: Store, name: str, rank: int, size: int, *, deadline: Deadline
    ) -> None:
        self.name = name
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._stream = _cuda.Stream(self._device)
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = self._NEVER
        with _no_watchdog():
            self._group: Any = called(
                lambda: _c10d.ProcessGroupNCCL(_c10d.PrefixStore(name, store), rank, size, options)
            )
        try:  # NCCL connects with its first operation, which may take long
            self.broadcast(self.allocate(1), deadline)()
        except TransferFailed:
            self.close()
            raise

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Return zeros on the device."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def broadcast(self, data: torch.Tensor, deadline: Deadline) -> Callable[[], None]:
        """Start to move `data` on the side stream, after what this thread has queued."""
        group = self._group
        if group is None:
            msg = "the process group is closed"
            raise TransferFailed(msg)
        options = _c10d.BroadcastOptions()
        options.rootRank = 0
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        done = _cuda.Event()
        with torch.cuda.stream(self._stream):
            called(lambda: group.broadcast([data], options).wait())  # orders the stream only
            done.record(self._stream)

        def wait() -> None:
            while not called(done.query):
                if not deadline.left_s:
                    self.close()
                    msg = f"the broadcast took longer than {deadline.timeout_s:g} s"
                    raise TransferFailed(msg)
                time.sleep(self._POLL_S)

        return wait

    def close(self) -> None:
        """Abort what runs, on this end, and drop the group."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()


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


def _has_nccl() -> bool:
    return torch.cuda.is_available() and dist.is_nccl_available()


def serve_store(host: str) -> tuple[TCPStore, str, int]:
    """Serve a store on one address and a port that the system chooses.

    torch's own server listens on all addresses, whatever host it is given; so the socket is bound
    here.

    Returns:
        The store, the numeric address and the port.
    """
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    with closing(listener):
        listener.bind(address)
        listener.listen(128)
        bound, port = listener.getsockname()[:2]
        store: TCPStore = _c10d.TCPStore(
            bound,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    return store, bound, port


def connect_store(
    host: str, port: int, deadline: Deadline, check: Callable[[], None]
) -> tuple[TCPStore, str]:
    """Connect to a store; `check` is called before each try, and raises to end them.

    torch's handshake has no timeout. If the trainer stands still in that very moment, this thread
    does too, until the trainer goes on or dies; the event loop does not wait for it.

    Returns:
        The store, and this end's own address towards it.

    Raises:
        TransferFailed: if nobody serves there.
    """
    while True:
        check()
        try:  # torch goes on trying until its timeout where nobody listens
            with socket.create_connection((host, port), timeout=deadline.left_s or 0.001) as probe:
                address: str = probe.getsockname()[0]
        except OSError as error:
            msg = f"no trainer serves weights at {host}:{port}: {error.strerror or error}"
            raise TransferFailed(msg) from None
        try:
            store: TCPStore = called(
                partial(
                    _c10d.TCPStore,
                    host,
                    port,
                    is_master=False,
                    wait_for_workers=False,
                    timeout=min(deadline.left, _CONNECT),
                )
            )
        except TransferFailed:  # it may have gone meanwhile, or it is slow
            if not deadline.left_s:
                raise
        else:
            return store, address


def called(call: Callable[[], T]) -> T:
    """Turn torch's errors into ours, without their traceback, which would keep the group alive."""
    try:
        return call()
    except RuntimeError as error:
        text = _PATH.sub("", str(error)).partition(". This")[0].splitlines()[0]
    raise TransferFailed(text)
