"""What can go wrong in a world, as data: each fault knows when it strikes and how to undo itself.

A fault is a frozen value with a readable repr, so that a list of them can be drawn from a seed,
printed, and shrunk by leaving some out. `strike` acts on a running `World`; where a fault lasts, it
undoes itself after `for_s` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tests.simulation.disk import fail

from ratchet.actors.batch_requests import RepeatRequest
from ratchet.actors.role import BUFFER, REGISTRY
from ratchet.messages import Message, StopTraining

if TYPE_CHECKING:
    from tests.simulation.world import World


_TASKS: set[asyncio.Task[None]] = set()


def _go(coro: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(coro)
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)


def _after(world: World, num_deliveries: int, strike: Callable[[], None]) -> None:
    left = num_deliveries

    def count(sender: str, receiver: str, message: Message) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            world.network.loop.call_in(None, 0.0, strike)

    world.network.observers.append(count)


@dataclass(frozen=True)
class Fault:
    """Strikes at a virtual second; `after` a number of deliveries instead, where that is given."""

    at: float

    def strike(self, world: World) -> None:
        raise NotImplementedError

    @property
    def kind(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Kill(Fault):
    """Workers die at once; or again and again. Their launcher starts them again."""

    names: tuple[str, ...]
    every_s: float
    times: int = 1
    after: int | None = None
    """strikes this many deliveries after `at`, so that it may fall between any two events"""

    def strike(self, world: World) -> None:
        if self.after is None:
            _go(self._kill(world))
            return
        _after(world, self.after, lambda: _go(self._kill(world)))

    async def _kill(self, world: World) -> None:
        for _ in range(self.times):
            for name in self.names:
                world.kill(name)
            await asyncio.sleep(self.every_s)


@dataclass(frozen=True)
class Silence(Fault):
    """A worker's links go silent, one way or both, and heal.

    After `DEAD_S` the others have given it up; it hears that it lost the registry, ends, and is
    started again.
    """

    name: str
    for_s: float
    ways: Literal["in", "out", "both"]

    def strike(self, world: World) -> None:
        world.network.silence(
            self.name, self.for_s, inward=self.ways != "out", outward=self.ways != "in"
        )


@dataclass(frozen=True)
class LoseTransfer(Fault):
    """The next transfer to these engines is lost."""

    names: tuple[str, ...]

    def strike(self, world: World) -> None:
        world.wire.lose.update(self.names)


@dataclass(frozen=True)
class SlowTransfer(Fault):
    """The next transfer to an engine takes longer, perhaps too long."""

    name: str
    by_s: float

    def strike(self, world: World) -> None:
        world.wire.slow[self.name] = self.by_s


@dataclass(frozen=True)
class CorruptTransfer(Fault):
    """The next weights for an engine arrive changed."""

    name: str

    def strike(self, world: World) -> None:
        world.wire.corrupt.add(self.name)


@dataclass(frozen=True)
class Sabotage(Fault):
    """For a while, a share of rewards or generations fails, or generations hang or are aborted."""

    what: Literal["reward", "generation", "hang", "abort"]
    share: float
    for_s: float

    def strike(self, world: World) -> None:
        setattr(world.trouble, self.what, self.share)
        world.network.loop.call_in(None, self.for_s, lambda: setattr(world.trouble, self.what, 0.0))


@dataclass(frozen=True)
class NonFinite(Fault):
    """The next steps are not finite."""

    what: Literal["gradients", "step"]
    num_steps: int

    def strike(self, world: World) -> None:
        backend = world.backend
        first = backend.num_batches + 1
        bad = frozenset(range(first, first + self.num_steps))
        if self.what == "gradients":
            backend._bad_gradients |= bad
        else:
            backend._bad_steps |= bad


@dataclass(frozen=True)
class DoubleStart(Fault):
    """A worker is launched although it runs: a second process takes its name."""

    name: str

    def strike(self, world: World) -> None:
        world.launch(self.name)


@dataclass(frozen=True)
class RepeatRequests(Fault):
    """What the trainers tell the buffer is late, and meanwhile they ask it again and again."""

    for_s: float
    times: int

    def strike(self, world: World) -> None:
        _go(self._repeat(world))

    async def _repeat(self, world: World) -> None:
        for name in {trainer.name: None for trainer in world.trainers}:
            world.network.wire.hold(name, BUFFER, self.for_s)
        for _ in range(self.times):
            for trainer in world.trainers:
                if not trainer.end.event.is_set():
                    trainer.ref.tell(RepeatRequest())
            await asyncio.sleep(self.for_s / self.times)


@dataclass(frozen=True)
class Freeze(Fault):
    """A process is stopped, and goes on later: SIGSTOP, SIGCONT."""

    name: str
    for_s: float

    def strike(self, world: World) -> None:
        host = world.network.hosts.get(self.name)
        if host is not None and host.lives:
            world.network.freeze(host, self.for_s)


@dataclass(frozen=True)
class Cut(Fault):
    """A process loses every connection, in the middle of whatever is under way."""

    name: str

    def strike(self, world: World) -> None:
        world.network.wire.cut(self.name)


@dataclass(frozen=True)
class SlowReader(Fault):
    """A process reads so slowly that whoever writes to it has to pause."""

    name: str
    bytes_per_s: float
    for_s: float

    def strike(self, world: World) -> None:
        rates = world.network.wire.bytes_per_s
        rates[self.name] = self.bytes_per_s
        world.network.loop.call_in(None, self.for_s, lambda: rates.pop(self.name, None))


@dataclass(frozen=True)
class WallClock(Fault):
    """The wall clock of a process jumps."""

    name: str
    by_s: float

    def strike(self, world: World) -> None:
        host = world.network.hosts.get(self.name)
        if host is not None:
            host.wall_jump_s += self.by_s


@dataclass(frozen=True)
class Crash(Fault):
    """The registry or the buffer dies, perhaps with its machine: the run ends, the files remain."""

    name: str
    power: bool

    def strike(self, world: World) -> None:
        world.crash(self.name, power=self.power)


@dataclass(frozen=True)
class Revive(Fault):
    """The registry or the buffer dies, and is started again from its file: the run goes on."""

    name: str
    down_s: float
    power: bool = False
    """the registry's machine goes down; the buffer's file is not made for that"""
    after: int = 1
    """it dies this many deliveries after `at`, so that it may be between any two events"""

    def strike(self, world: World) -> None:
        def die() -> None:
            _go(world.revive(self.name, power=self.power, after_s=self.down_s))

        _after(world, self.after, die)


@dataclass(frozen=True)
class BadDisk(Fault):
    """Nothing can be written for a while."""

    name: str
    error: Literal["database or disk is full", "disk I/O error"]
    for_s: float

    def strike(self, world: World) -> None:
        store = world.store if self.name == REGISTRY else world.ledger
        world.network.loop.call_in(None, self.for_s, fail(store, self.error))


@dataclass(frozen=True)
class Stop(Fault):
    """The user ends the run."""

    def strike(self, world: World) -> None:
        world.trainer.tell(StopTraining("enough"))
