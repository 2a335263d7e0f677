"""How the two ends of a transfer meet at the trainer's store, before any bucket moves: both sides.

Each engine pushes a `Ready` onto the queue of the transfer and waits for the trainer's one `Go`,
which comes when all are there, or says why there is none. So nobody enters a group that is not
whole, and a group is kept only when all ends say that they hold the same one. Runs on the threads
of the links; every wait ends with the deadline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

from ratchet.errors import TransferFailed
from ratchet.transport.weights.groups import Deadline, called
from ratchet.transport.weights.link import Link
from ratchet.types import WeightRoute

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


class Ready(msgspec.Struct, frozen=True):
    """An engine has come to a transfer."""

    rank: int
    holds: str | None
    """name of the group that it is still in"""
    failure: str | None = None
    """why it cannot take part"""
    host: str = ""
    """which memory it could share with the trainer; "" where it cannot"""


class Go(msgspec.Struct, frozen=True):
    """The trainer's answer to all engines of a transfer."""

    group: str | None
    """name of the group that carries the transfer, new or held; None where there is none"""
    failure: str | None = None
    shared: str | None = None
    """name of the shared memory that the buckets come through, in the place of the group"""


def announce(link: Link, route: WeightRoute, ready: Ready, deadline: Deadline) -> None:
    """Tell the trainer that an engine has come.

    Raises:
        TransferFailed: if the trainer's store cannot be reached.
    """
    store = link.store(deadline)
    called(lambda: store.queue_push(_ready_key(route.group), msgspec.json.encode(ready)))


def wait_for_go(link: Link, route: WeightRoute, deadline: Deadline) -> str:
    """Return the name of the group that carries the transfer.

    Raises:
        TransferFailed: if the trainer gave the transfer up, or does not answer.
    """
    store, key = link.store(deadline), _go_key(route.group)
    if not link.until(lambda: store.check([key]), deadline):
        msg = f"the trainer did not begin the transfer within {deadline.timeout_s:g} s"
        raise TransferFailed(msg)
    go = msgspec.json.decode(called(lambda: store.get(key)), type=Go)
    if go.group is None:
        msg = f"the transfer was given up: {go.failure}"
        raise TransferFailed(msg)
    return go.group


def gather_ready(
    link: Link, transfer: str, engines: Sequence[str], deadline: Deadline
) -> set[str | None]:
    """Wait for every engine of a transfer.

    Args:
        link: the trainer's.
        transfer: its name.
        engines: by rank, from rank 1.
        deadline: for all of them together.

    Returns:
        The names of the groups that they hold, None among them if one holds none.

    Raises:
        TransferFailed: if one did not come, or says that it cannot take part; the text names it.
    """
    store, key = link.store(deadline), _ready_key(transfer)
    missing = dict(enumerate(engines, 1))
    held: set[str | None] = set()

    def all_here() -> bool:
        while missing and store.queue_len(key):
            ready = msgspec.json.decode(store.queue_pop(key), type=Ready)
            engine = missing.pop(ready.rank, None)
            if ready.failure is not None:
                msg = f"{engine} cannot take part: {ready.failure}"
                raise TransferFailed(msg)
            held.add(ready.holds)
        return not missing

    if not link.until(all_here, deadline):
        names = ", ".join(missing.values())
        msg = f"did not come to the transfer within {deadline.timeout_s:g} s: {names}"
        raise TransferFailed(msg)
    return held


class Answers:
    """The trainer's answers in the store. They stay until nobody can still be waiting for them."""

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._given: deque[tuple[float, str]] = deque()

    def give(self, store: TCPStore, transfer: str, go: Go) -> None:
        """Answer all engines of a transfer, those that come later too."""
        now = monotonic()
        while self._given and self._given[0][0] + self._lifetime_s < now:
            key = self._given.popleft()[1]
            called(partial(store.delete_key, key))
        key = _go_key(transfer)
        called(lambda: store.set(key, msgspec.json.encode(go).decode()))
        self._given.append((now, key))


def _ready_key(transfer: str) -> str:
    return f"{transfer}/ready"


def _go_key(transfer: str) -> str:
    return f"{transfer}/go"
