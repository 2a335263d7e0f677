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
from pathlib import Path
from typing import Any

import msgspec
from tests.helpers.mailbox_fault_actors import Actor, DeadLetters, Ledger, Log, Orders, Sender, say

from ratchet.errors import RatchetError
from ratchet.messages import BurnVersion
from ratchet.transport.mailbox import dial, frames, hello, session
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.node import Node

DAY_S = 86_400.0


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
