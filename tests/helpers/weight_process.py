"""Engines and trainers of weight sync as processes of their own.

An engine is the product's `RolloutActor` with a real receiver, over a model that is a few tensors;
a trainer is a real sender. Pipes are their mailboxes: what the other end of the pipe asks and tells
reaches the actor, and a process that has gone is a mailbox that has.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
from collections.abc import Awaitable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from tests.helpers.actors import make_system
from tests.helpers.config import small_config
from tests.helpers.refs import RecordedDirectory
from tests.helpers.weights import FakeSink, FakeSource, digest_of_tensors

from ratchet.actors.rollout import RolloutActor
from ratchet.backends.rollout.base import EngineStats
from ratchet.config import WeightsConfig
from ratchet.errors import ActorDead, AskTimeout, RatchetError, from_wire, to_wire
from ratchet.messages import AbortLoad, Down, LoadWeights, Message, RoleRegistered, WeightsLoaded
from ratchet.transport.mailbox.base import Recipient
from ratchet.transport.weights.registry import open_receiver, open_sender
from ratchet.types import RoleInfo, WeightManifest, WeightRoute

HOST = "127.0.0.1"
BUCKET_MIB = 2.0
BUCKET_BYTES = int(BUCKET_MIB * 2**20)


# --- to an engine


class Asked(msgspec.Struct, frozen=True, tag=True):
    number: int
    message: LoadWeights


class Told(msgspec.Struct, frozen=True, tag=True):
    message: AbortLoad


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Stand still in the n-th write of the next load, for ever, after saying so."""

    write: int


class Deafen(msgspec.Struct, frozen=True, tag=True):
    """Let what is asked and told wait, or no longer."""

    deaf: bool


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Answer with a `State`."""


# --- to a trainer


class Send(msgspec.Struct, frozen=True, tag=True):
    """Plan for these engines, say so, send; hold for ever in the n-th read, after saying so."""

    version: int
    engines: tuple[str, ...]
    hold_read: int | None = None


# --- from either


class Replied(msgspec.Struct, frozen=True, tag=True):
    number: int
    loaded: WeightsLoaded | None
    kind: str = ""
    text: str = ""


class State(msgspec.Struct, frozen=True, tag=True):
    version: int | None
    paused: bool
    digest: str


class Planned(msgspec.Struct, frozen=True, tag=True):
    manifest: WeightManifest
    routes: dict[str, WeightRoute]


class Middle(msgspec.Struct, frozen=True, tag=True):
    """The process is in the middle of a transfer."""


Command = Asked | Told | Hold | Deafen | Describe | Send
Event = Replied | State | Planned | Middle


def big_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Return 24 parameters of 2 MiB each: far more than sockets hold on the way."""
    rng = torch.Generator().manual_seed(seed)
    return {f"weight.{n}": torch.randn(512, 1024, generator=rng) for n in range(24)}


class _Engine(FakeSink):
    """As much of an engine as weight sync sees; may stand still in a write."""

    def __init__(self, conn: Connection, seed: int) -> None:
        super().__init__(big_tensors(seed))
        for name, tensor in big_tensors(seed).items():
            self.tensors[name].copy_(tensor)
        self.conn = conn
        self.hold_write: int | None = None

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        await super().write(tensors)
        if self.hold_write is None:
            return
        self.hold_write -= 1
        if self.hold_write == 0:
            self.hold_write = None
            _say(self.conn, Middle())
            await asyncio.Event().wait()

    async def start(self) -> None:
        pass

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass

    def stats(self) -> EngineStats:
        return EngineStats(0.0, 0.0, 0, 0, 0)


def run_engine(conn: Connection, name: str, incarnation: str, seed: int, weights: dict) -> None:
    torch.set_num_threads(1)
    asyncio.run(_engine(conn, RoleInfo("rollout", name, incarnation), seed, weights))


async def _engine(conn: Connection, role: RoleInfo, seed: int, weights: dict) -> None:
    config = small_config(weights=weights)
    others = RecordedDirectory()
    others.ref("registry").answer = lambda _: RoleRegistered((), ())
    engine: Any = _Engine(conn, seed)
    actor = RolloutActor.start(
        make_system(remote=others),
        role,
        config=config,
        engine=engine,
        receiver=open_receiver(config.weights),
        scorer=Any,  # type: ignore[arg-type] # nothing is generated
        eval_prompts=(),
    )
    waiting: list[Asked | Told] = []
    deaf = False
    tasks: set[asyncio.Task[None]] = set()

    async def ask(asked: Asked) -> None:
        try:
            loaded = await actor.ask(asked.message, block=False, timeout=600)
        except RatchetError as error:
            _say(conn, Replied(asked.number, None, *to_wire(error)))
        else:
            _say(conn, Replied(asked.number, loaded))

    while True:
        match await _hear(conn, Command):
            case (Asked() | Told()) as command:
                waiting.append(command)
            case Hold(write):
                engine.hold_write = write
            case Deafen(deaf):
                pass
            case Describe():
                _say(
                    conn,
                    State(
                        engine.version,
                        engine.paused,
                        digest_of_tensors(engine.tensors, BUCKET_BYTES),
                    ),
                )
        while waiting and not deaf:
            command = waiting.pop(0)
            if isinstance(command, Told):
                actor.tell(command.message)
            else:
                tasks.add(asyncio.create_task(ask(command)))


def run_trainer(conn: Connection, weights: dict) -> None:
    torch.set_num_threads(1)
    asyncio.run(_trainer(conn, WeightsConfig(**weights)))


async def _trainer(conn: Connection, config: WeightsConfig) -> None:
    """A trainer of term 1, which dies with the first transfer that fails."""
    source = FakeSource(big_tensors(0))
    sender = open_sender(config, HOST, source)
    while True:
        command = await _hear(conn, Command)
        reads: list[int] = []
        hold_read = command.hold_read

        def hold(names: Sequence[str], reads: list[int] = reads) -> None:
            reads.append(1)
            if len(reads) == hold_read:  # noqa: B023 - the hook of this very round
                _say(conn, Middle())
                threading.Event().wait()

        source.tensors, source.on_read = big_tensors(command.version), hold
        manifest, routes = sender.plan(1, command.version, command.version, command.engines)
        _say(conn, Planned(manifest, dict(routes)))
        await sender.send(manifest)


def _say(conn: Connection, message: Command | Event) -> None:
    conn.send_bytes(msgspec.msgpack.encode(message))


async def _hear(conn: Connection, kind: Any) -> Any:
    data = await asyncio.to_thread(conn.recv_bytes)
    return msgspec.msgpack.decode(data, type=kind)


class Child:
    """A process; for the engine in it, also the ref of its actor. Its events are heard by the loop
    that it is made on. Forked from a server that has torch loaded already.
    """

    def __init__(self, name: str, target: Any, *arguments: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.helpers.weight_process"])
        self._conn, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self._replies: dict[int, asyncio.Future[WeightsLoaded]] = {}
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._watchers: list[Recipient] = []
        self._gone = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._conn.fileno(), self._readable)

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    # --- the ref of its actor

    def tell(self, message: Message) -> None:
        if isinstance(message, AbortLoad):
            self.say(Told(message))

    def ask(self, message: Any, *, block: bool = False, timeout: float) -> Awaitable[Any]:
        del block
        return self._ask(message, timeout)

    def watch(self, watcher: Recipient) -> None:
        self._watchers.append(watcher)

    async def _ask(self, message: LoadWeights, timeout_s: float) -> WeightsLoaded:
        if self._gone:
            raise ActorDead(f"{self.name} is gone")
        number = len(self._replies)
        reply = self._replies[number] = self._loop.create_future()
        self.say(Asked(number, message))
        try:
            return await asyncio.wait_for(reply, timeout_s)
        except TimeoutError:
            raise AskTimeout(f"{self.name} did not answer within {timeout_s} s") from None

    # --- the test's hold on it

    def say(self, command: Command) -> None:
        if not self._gone:
            _say(self._conn, command)

    async def hear(self) -> Any:
        """Return the next event that is not a reply."""
        async with asyncio.timeout(60):
            return await self._events.get()

    async def state(self) -> State:
        self.say(Describe())
        state = await self.hear()
        assert isinstance(state, State)
        return state

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        self.kill()
        if not self._gone:
            self._loop.remove_reader(self._conn.fileno())
        self._conn.close()

    def _readable(self) -> None:
        try:
            event = msgspec.msgpack.decode(self._conn.recv_bytes(), type=Event)
        except (EOFError, ConnectionResetError):
            self._lost()
            return
        if not isinstance(event, Replied):
            self._events.put_nowait(event)
            return
        reply = self._replies[event.number]
        if reply.done():
            return
        if event.loaded is not None:
            reply.set_result(event.loaded)
        else:
            reply.set_exception(from_wire(event.kind, event.text))

    def _lost(self) -> None:
        self._gone = True
        self._loop.remove_reader(self._conn.fileno())
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ActorDead(f"{self.name} died"))
        for watcher in self._watchers:
            watcher.tell(Down(self.name, "killed"))
