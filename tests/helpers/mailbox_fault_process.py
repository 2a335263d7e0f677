"""A process with one node that sends and receives numbered messages, for the fault tests.

Run as a module; its `Orders` come as JSON on the first line of stdin, commands on the next ones.
Events go to stdout, one a line. What must survive a kill -9 goes into files of its own, one line
for each message, written before anything else happens with it:

    NAME.LIFE.gave      it was about to be sent:  receiver lane number
    NAME.LIFE.acked     an ask of it returned:    receiver lane number
    NAME.LIFE.dead      it became a dead letter, or its ask failed:  receiver lane number
    NAME.LIFE.heard     it was handled here:      sender life lane number

Consumes commands (`flow`, `finish`, `quit`), produces events (`up`, `watching`, `down`,
`peer_silent`, `finished`). A message is (sender, sender's life, lane, number); numbers count from
0 for each receiver and lane.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from ratchet.errors import RatchetError
from ratchet.messages import AbortLoad, BurnVersion, Down, GroupFailed, VersionBurnt
from ratchet.transport.mailbox import dial, frames, hello, session
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.node import Node
from ratchet.types import RolloutStats

CONTROL, BULK = "control", "bulk"
DAY_S = 86_400.0


class Orders(msgspec.Struct):
    """What a process is to be."""

    directory: str
    name: str
    life: int
    key: str
    receivers: tuple[str, ...] = ()
    places: dict[str, str] = {}
    """where others listen, if not at DIRECTORY/NAME"""
    limits: dict[str, float] = {}
    jumps: bool = False
    """the wall clock jumps by a day each time that it is read"""
    protocol: int = frames.PROTOCOL
    fault: str = ""
    """one of `FAULTS`: what it is to do wrong"""
    per_turn: int = 6
    turn_s: float = 0.01


def say(*words: object) -> None:
    """Tell the test."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Ledger:
    """Files that hold what was written to them, whatever happens to the process."""

    def __init__(self, orders: Orders) -> None:
        self._stem = f"{orders.directory}/{orders.name}.{orders.life}"
        self._files: dict[str, int] = {}

    def note(self, kind: str, *words: object) -> None:
        if kind not in self._files:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
            self._files[kind] = os.open(f"{self._stem}.{kind}", flags, 0o600)
        os.write(self._files[kind], (" ".join(map(str, words)) + "\n").encode())


class Log:
    """What the test waits for goes to it; what a person must see goes to stderr."""

    def debug(self, event: str, **fields: Any) -> None:
        pass

    info = debug

    def warning(self, event: str, **fields: Any) -> None:
        if event == "peer_silent":
            say(event, fields["peer"], time.monotonic())
        self.error(event, **fields)

    def error(self, event: str, **fields: Any) -> None:
        sys.stderr.write(f"{event} {fields}\n")
        sys.stderr.flush()


class DeadLetters:
    """Writes down what was not delivered."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def record(self, *, sender: str | None, receiver: str, message: Any, reason: str) -> None:
        del sender, reason
        match message:
            case AbortLoad():
                self._ledger.note("dead", receiver, CONTROL, message.version)
            case GroupFailed():
                self._ledger.note("dead", receiver, BULK, message.group_id)
            case VersionBurnt():
                pass  # an answer: the asker accounts for its question


class Actor:
    """Writes down what it is told before it does anything else. It lives as long as its process."""

    def __init__(self, name: str, ledger: Ledger) -> None:
        self.name = name
        self._ledger = ledger

    def watch(self, watcher: Any) -> None:
        pass

    def tell(self, message: Any) -> None:
        match message:
            case AbortLoad():
                self._ledger.note("heard", message.reason, message.term, CONTROL, message.version)
            case GroupFailed():
                life, number = message.attempt, message.group_id
                self._ledger.note("heard", message.worker, life, BULK, number)

    def ask(self, message: Any, *, block: bool = False, timeout: float = 0.0) -> Any:
        del block, timeout
        future = asyncio.get_running_loop().create_future()
        future.set_result(VersionBurnt(message.version))
        if message.version >= 0:
            self._ledger.note("heard", message.reason, message.term, CONTROL, message.version)
        return future


class Sender:
    """Sends to one receiver, watches it, and watches its next life when it has gone."""

    def __init__(self, node: Node, receiver: str, orders: Orders, ledger: Ledger) -> None:
        self.name = f"watch of {receiver}"
        self._node = node
        self._receiver = receiver
        self._orders = orders
        self._ledger = ledger
        self._ref = node.ref(receiver)
        self._numbers = Counter[str]()
        self._asks: set[asyncio.Future[Any]] = set()
        self._gone = asyncio.Event()

    def tell(self, message: Any) -> None:
        """Hear that the receiver is gone: it is its own watcher."""
        if isinstance(message, Down):
            say("down", self._receiver, time.monotonic(), message.reason)
            self._gone.set()

    async def watch(self) -> None:
        """Keep a watch on each life of the receiver."""
        question = BurnVersion(self._orders.life, -1, self._orders.name)
        while self._node._peers[self._receiver].refusal.error is None:
            self._gone.clear()
            try:
                await self._ref.ask(question, block=False, timeout=60.0)
                self._ref.watch(self)
                await self._ref.ask(question, block=False, timeout=60.0)
            except RatchetError:  # it ended meanwhile; its next life answers
                continue
            if not self._gone.is_set():  # the answer followed on the watch
                say("watching", self._receiver, self._incarnation())
                await self._gone.wait()

    def _incarnation(self) -> str | None:
        return self._node._peers[self._receiver].lives.present

    def _next(self, lane: str) -> int:
        number = self._numbers[lane]
        self._numbers[lane] += 1
        self._ledger.note("gave", self._receiver, lane, number)
        return number

    def burst(self, rng: random.Random) -> None:
        """Send a few messages of every kind."""
        me, life = self._orders.name, self._orders.life
        for _ in range(self._orders.per_turn):
            draw = rng.random()
            if draw < 0.5:
                self._ref.tell(AbortLoad(life, self._next(CONTROL), me))
            elif draw < 0.85:
                number, size = self._next(BULK), rng.choice((10, 10, 1000, 30_000))
                stats = RolloutStats(me, "x" * size)
                self._ref.tell(GroupFailed(me, "", number, life, "reward", "", stats))
            else:
                self._ask(BurnVersion(life, self._next(CONTROL), me))

    def _ask(self, question: BurnVersion) -> None:
        asked = asyncio.ensure_future(self._ref.ask(question, block=False, timeout=60.0))
        self._asks.add(asked)

        def end(reply: asyncio.Future[VersionBurnt]) -> None:
            self._asks.discard(reply)
            if not reply.cancelled():
                kind = "acked" if reply.exception() is None else "dead"
                self._ledger.note(kind, self._receiver, CONTROL, question.version)

        asked.add_done_callback(end)

    @property
    def settled(self) -> bool:
        """All that was given is delivered or dead."""
        return not self._asks and self._node._peers[self._receiver].session.idle


async def flow(senders: list[Sender], orders: Orders) -> None:
    """Send for ever, at a steady pace."""
    rng = random.Random(f"{orders.name} {orders.life}")
    while True:
        for each in senders:
            each.burst(rng)
        await asyncio.sleep(orders.turn_s)


async def main(orders: Orders, commands: asyncio.StreamReader) -> None:
    ledger = Ledger(orders)
    actor = Actor(orders.name, ledger)
    here = Path(orders.directory)

    def locate(wanted: str) -> Address:
        return Address.parse(orders.places.get(wanted, f"unix:{here}/{wanted}"))

    ids = itertools.count()
    node = Node(
        name=orders.name,
        incarnation=f"{orders.name}.{orders.life}",
        address=Address.parse(f"unix:{here}/{orders.name}"),
        key=bytes.fromhex(orders.key),
        run_id="run",
        local={orders.name: actor}.get,
        locate=locate,
        dead_letters=DeadLetters(ledger),
        new_id=lambda: f"{orders.name}.{orders.life}/{next(ids)}",
        random_bytes=os.urandom,
        log=Log(),
        limits=Limits(**orders.limits),  # type: ignore[arg-type]
    )
    await node.start()
    say("up")
    senders = [Sender(node, each, orders, ledger) for each in orders.receivers]
    tasks = [asyncio.create_task(each.watch()) for each in senders]
    flowing: asyncio.Task[None] | None = None
    while line := await commands.readline():
        match line.decode().split():
            case ["flow"]:
                flowing = asyncio.create_task(flow(senders, orders))
            case ["finish"]:
                if flowing is not None:
                    flowing.cancel()
                # a session tells nobody here when it is idle
                while not all(each.settled for each in senders):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                say("finished")
            case ["ask", receiver]:
                try:
                    question = BurnVersion(orders.life, -1, orders.name)
                    await node.ref(receiver).ask(question, block=False, timeout=60.0)
                    say("answered", receiver)
                except RatchetError as error:
                    say("failed", type(error).__name__, str(error))
            case ["quit"]:
                break
    for task in tasks:
        task.cancel()
    await node.stop(1.0)


# --- what a test plants, to see that its checks can fail

receive = session.Session.receive
start_dial = dial.Dialler.start
ask = Actor.ask


def _double(self: session.Session, frame: Any, num_bytes: int) -> list[Any]:
    """Hands out some of it twice."""
    envelopes = receive(self, frame, num_bytes)
    return envelopes * 2 if random.random() < 0.02 else envelopes


def _lose(self: session.Session, frame: Any, num_bytes: int) -> list[Any]:
    """Acknowledges what it then forgets, now and then."""
    envelopes = receive(self, frame, num_bytes)
    return envelopes[1:] if random.random() < 0.02 else envelopes


def _shuffle(self: session.Session, frame: Any, num_bytes: int) -> list[Any]:
    """Hands out what came together from the last to the first."""
    return receive(self, frame, num_bytes)[::-1]


def _boast(self: Actor, message: Any, **kwargs: Any) -> Any:
    """Answers some asks without having handled them."""
    if random.random() < 0.1:
        message = msgspec.structs.replace(message, version=-1)
    return ask(self, message, **kwargs)


def _dawdle(self: dial.Dialler, *, yielding: bool = False) -> None:
    """Is in no hurry to learn how a peer is that it has lost."""
    asyncio.get_running_loop().call_later(1.5, lambda: start_dial(self, yielding=yielding))


FAULTS: dict[str, tuple[Any, str, Any]] = {
    "double": (session.Session, "receive", _double),
    "lose": (session.Session, "receive", _lose),
    "shuffle": (session.Session, "receive", _shuffle),
    "boast": (Actor, "ask", _boast),
    "dawdle": (dial.Dialler, "start", _dawdle),
}


def jump() -> None:
    """Make the wall clock jump by a day, to and fro, each time that anybody reads it."""
    days = itertools.cycle((DAY_S, -DAY_S))
    real = time.time

    def jumping() -> float:
        return real() + next(days)

    time.time = jumping
    time.time_ns = lambda: int(jumping() * 1e9)


async def run() -> None:
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    orders = msgspec.json.decode(await commands.readline(), type=Orders)
    if orders.jumps:
        jump()
    frames.PROTOCOL = hello.PROTOCOL = orders.protocol  # type: ignore[misc]
    if orders.fault:
        setattr(*FAULTS[orders.fault])
    await main(orders, commands)


if __name__ == "__main__":
    asyncio.run(run())
