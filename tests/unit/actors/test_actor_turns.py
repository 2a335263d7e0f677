"""A turn ends once for all messages that waited, and lets others run."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.helpers.actors import make_system
from tests.helpers.probe import Probe, Run, Tick, Unknown
from tests.simulation.loop import run_virtual

from ratchet.actors.actor import Actor
from ratchet.actors.life import YIELD_EVERY
from ratchet.actors.system import System
from ratchet.messages import Message
from ratchet.transport.mailbox.base import Trace, current_trace


def test_a_burst_lets_other_tasks_run() -> None:
    async def main() -> None:
        ref = Probe.start(make_system())
        await asyncio.sleep(0)
        turns = 0

        async def other() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        for _ in range(10 * YIELD_EVERY):
            ref.tell(Tick())
        task = asyncio.create_task(other())
        await ref.ask(Run("context"), block=False)
        task.cancel()
        assert turns >= 10

    run_virtual(main())


class Turns(Actor[Tick]):
    """Notes each message and each end of a turn, with the trace that it is under."""

    def __init__(self, system: System) -> None:
        super().__init__(system, "turns")
        self.notes: list[Any] = []

    def receive(self, message: Tick) -> None:
        self.notes.append(message.what)
        if message.what == "more":
            self.actor_ref.tell(Tick("itself"))

    def end_turn(self) -> None:
        trace = current_trace.get()
        self.notes.append(("end", None if trace is None else trace.trace_id))


async def _turns(*messages: Message | None) -> list[Any]:
    """Tell messages at once, each under a trace of its own, "0", "1" ...; None is a stop."""
    actor = Turns(make_system())
    actor._start_actor_loop()
    ref = actor.actor_ref
    for number, message in enumerate(messages):
        token = current_trace.set(Trace(str(number), None))
        ref.stop(block=False) if message is None else ref.tell(message)
        current_trace.reset(token)
    await asyncio.sleep(1)
    return actor.notes


def test_a_turn_ends_once_for_all_messages_that_wait_under_the_trace_of_the_last() -> None:
    assert run_virtual(_turns(Tick("a"), Tick("b"), Tick("c"))) == ["a", "b", "c", ("end", "2")]


def test_what_a_handler_tells_its_own_actor_is_of_the_same_turn() -> None:
    assert run_virtual(_turns(Tick("more"))) == ["more", "itself", ("end", "0")]


def test_a_turn_ends_before_a_stop_and_after_a_message_that_is_not_accepted() -> None:
    assert run_virtual(_turns(Tick("a"), None)) == ["a", ("end", None)]
    assert run_virtual(_turns(Tick("a"), Unknown())) == ["a", ("end", None)]


def test_a_turn_ends_when_others_have_to_run() -> None:
    notes = run_virtual(_turns(*[Tick("a")] * (YIELD_EVERY + 1)))
    assert notes == [*["a"] * YIELD_EVERY, ("end", str(YIELD_EVERY - 1)), "a", ("end", "64")]
