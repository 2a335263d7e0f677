"""How the two ends of a transfer meet at the trainer's store, before, between and after its rounds:
both sides.

A transfer goes in rounds. Before each one every engine pushes a `Ready` onto the round's queue,
which says what it has by now, and waits for the trainer's `Go`: the group that carries the round,
new or held, the part that it begins with, or that the transfer goes on without this engine. A round
that breaks is followed by the next, in a group of those who came back; an engine that has
everything says so, and waits no longer.

Runs on the threads of the links. The trainer waits for an engine only for a part of the transfer's
time, so that the others still make it; an engine waits for the trainer until its deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Final

import msgspec

from ratchet.errors import TransferFailed
from ratchet.transport.weights.deadline import Deadline
from ratchet.transport.weights.groups import called
from ratchet.transport.weights.link import Link
from ratchet.types import WeightRoute

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

GRACE_S: Final = 1.0
"""Who waits for another that has the same deadline waits so much longer: the event loop for its
thread, an engine for the trainer, so that the one who knows says what went wrong.
"""

_PATIENCE: Final = 0.25
"""Fraction of a transfer's time. One engine that stops in the middle costs the others two of them:
until the bucket is given up, and until the engine has not come back.
"""


class Ready(msgspec.Struct, frozen=True):
    """An engine has come to a round."""

    rank: int
    """of the engine's route"""
    holds: str | None
    """name of the group that it is still in"""
    has: int = 0
    """how many parts it has: the buckets, in order, and the trailer behind them"""
    failure: str | None = None
    """why it cannot take part"""
    host: str = ""
    """which memory it could share with the trainer; "" where it cannot"""
    outside: tuple[int, ...] = ()
    """how many ranks each of its servers brings, where those take part in the place of this one"""


class Go(msgspec.Struct, frozen=True):
    """The trainer's answer to one engine."""

    group: str | None
    """name of the group that carries the round, new or held; None where this engine is in none"""
    rank: int = 0
    """in that group"""
    size: int = 0
    """of that group, with the trainer"""
    first: int = 0
    """the part that the round begins with"""
    failure: str | None = None
    shared: str | None = None
    """name of the shared memory that the buckets come through, in the place of the group"""
    trailer: bytes = b""
    """what follows the last bucket, where the group cannot bring it"""


def patience_s(timeout_s: float) -> float:
    """Return how long to wait for one engine, or one bucket, of a transfer."""
    return timeout_s * _PATIENCE


def announce(link: Link, route: WeightRoute, number: int, ready: Ready, deadline: Deadline) -> None:
    """Tell the trainer that an engine has come to a round, or has everything.

    Raises:
        TransferFailed: if the trainer's store cannot be reached.
    """
    store = link.store(deadline)
    key = _ready_key(route.group, number)
    called(lambda: store.queue_push(key, msgspec.json.encode(ready)))


def wait_for_go(link: Link, route: WeightRoute, number: int, deadline: Deadline) -> Go:
    """Return the answer to an engine that has come to a round; it names a group.

    Raises:
        TransferFailed: if the transfer goes on without this engine, or the trainer gave it up, or
            does not answer.
    """
    store, key = link.store(deadline), _go_key(route.group, number, route.rank)
    if not link.until(lambda: store.check([key]), deadline):
        msg = f"the trainer did not begin the transfer within {deadline.timeout_s:g} s"
        raise TransferFailed(msg)
    try:
        go = msgspec.json.decode(called(lambda: store.get(key)), type=Go)
    except msgspec.MsgspecError as error:
        msg = f"what the store has as the trainer's answer cannot be read: {error}"
        raise TransferFailed(msg) from None
    if go.group is None:
        raise TransferFailed(str(go.failure))
    return go


def gather_ready(
    link: Link,
    point: str,
    number: int,
    engines: Mapping[int, str],
    left: Mapping[str, str],
    deadline: Deadline,
) -> tuple[dict[int, Ready], dict[int, str]]:
    """Wait for the engines of a round.

    Args:
        link: the trainer's.
        point: the name under which the engines meet.
        number: of the round.
        engines: by the rank of their route.
        left: those who will not come, and why; may grow meanwhile.
        deadline: for all of them together.

    Returns:
        Those who came and can go on, or have everything; and why each of the others does not.
    """
    store, key = link.store(deadline), _ready_key(point, number)
    missing = dict(engines)
    came: dict[int, Ready] = {}
    lost: dict[int, str] = {}

    def all_here() -> bool:
        while missing and store.queue_len(key):
            try:
                ready = msgspec.json.decode(store.queue_pop(key), type=Ready)
            except msgspec.MsgspecError:  # of no engine of ours: whoever is missing stays so
                continue
            if missing.pop(ready.rank, None) is None:
                continue
            if ready.failure is None:
                came[ready.rank] = ready
            else:
                lost[ready.rank] = f"it cannot take part: {ready.failure}"
        for rank in [rank for rank, engine in missing.items() if engine in left]:
            lost[rank] = left[missing.pop(rank)]
        return not missing

    if not link.until(all_here, deadline):
        late = f"it did not come to the transfer within {deadline.timeout_s:.3g} s"
        lost.update(dict.fromkeys(missing, late))
    return came, lost


class Answers:
    """The trainer's answers in the store. They stay until nobody can still be waiting for them."""

    def __init__(self, lifetime_s: float) -> None:
        self._lifetime_s = lifetime_s
        self._given: deque[tuple[float, str]] = deque()
        self._lock = threading.Lock()

    def give(self, store: TCPStore, point: str, number: int, rank: int, go: Go) -> None:
        """Answer an engine, on the thread of any link."""
        key = _go_key(point, number, rank)
        called(lambda: store.set(key, msgspec.json.encode(go).decode()))
        with self._lock:
            self._given.append((monotonic(), key))
            old = self._pop_old()
        for key in old:
            called(partial(store.delete_key, key))

    def _pop_old(self) -> list[str]:
        now = monotonic()
        old: list[str] = []
        while self._given and self._given[0][0] + self._lifetime_s < now:
            old.append(self._given.popleft()[1])
        return old


def _ready_key(point: str, number: int) -> str:
    return f"{point}/{number}/ready"


def _go_key(point: str, number: int, rank: int) -> str:
    return f"{point}/{number}/go/{rank}"
