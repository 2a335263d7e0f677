"""Who sends and who hears in a process of the fault tests, and the files that account for it.

See `mailbox_fault_process` for what is in which file.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections import Counter
from typing import Any

import msgspec

from ratchet.errors import RatchetError
from ratchet.messages import AbortLoad, BurnVersion, Down, GroupFailed, VersionBurnt
from ratchet.transport.mailbox import frames
from ratchet.transport.mailbox.node import Node
from ratchet.types import RolloutStats

CONTROL, BULK = "control", "bulk"


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
    """one of `FAULTS` of `mailbox_fault_process`: what it is to do wrong"""
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
