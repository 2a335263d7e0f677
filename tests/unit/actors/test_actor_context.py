"""What a message runs under: its trace, its log fields and its actor, and nothing else."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest
import structlog.contextvars
from tests.helpers.actors import make_system
from tests.helpers.probe import Done, Probe, Run, log_of
from tests.simulation.loop import run_virtual

from ratchet.actors.actor import Actor, Answer
from ratchet.transport.mailbox.base import Trace, current_trace


def test_an_actor_keeps_no_context_of_its_starter() -> None:
    secret: contextvars.ContextVar[str] = contextvars.ContextVar("secret", default="unset")

    class Curious(Actor[Run]):
        def receive(self, message: Run) -> Answer:
            match message:
                case Run():
                    return Done((secret.get(), structlog.contextvars.get_contextvars()))

    async def main() -> None:
        secret.set("of the starter")
        current_trace.set(Trace("starter", 1))
        structlog.contextvars.bind_contextvars(starter=True)
        try:
            ref = Curious.start(make_system(), "curious")
            done = await ref.ask(Run(""), block=False)
            assert done.value == ("unset", {"trace_id": "starter", "version": 1})
            assert current_trace.get() == Trace("starter", 1)
        finally:
            structlog.contextvars.clear_contextvars()

    contextvars.copy_context().run(run_virtual, main())


@pytest.mark.parametrize("what", ["context", "child_context"])
def test_each_message_has_its_own_trace(what: str) -> None:
    async def main() -> None:
        ref = Probe.start(make_system())
        for trace in (Trace("one", None), Trace("two", 5)):
            token = current_trace.set(trace)
            reply = ref.ask(Run(what), block=False)
            current_trace.reset(token)  # captured at send, not at receipt
            fields = (
                {"trace_id": "one"} if trace.version is None else {"trace_id": "two", "version": 5}
            )
            assert (await reply).value == (trace, fields, "probe")
        assert current_trace.get() is None

    run_virtual(main())


def test_a_trace_begins_where_there_is_none_and_is_passed_on() -> None:
    async def main() -> None:
        system = make_system()
        first, _ = Probe.start(system, "first"), Probe.start(system, "second")
        done = await first.ask(Run("ask_other", "second"), block=False)
        trace, fields, actor = done.value
        assert trace == Trace(fields["trace_id"], None)
        assert trace.trace_id.startswith("id-")
        assert actor == "second"
        again = await first.ask(Run("context"), block=False)
        assert again.value[0].trace_id != trace.trace_id

    run_virtual(main())


def test_nothing_of_a_message_outlasts_it() -> None:
    ended: list[Any] = []

    class Last(Probe):
        def on_stop(self) -> None:
            ended.append(self.context())

    async def main() -> None:
        ref = Last.start(make_system())
        for trace in (Trace("one", 5), Trace("two", None)):
            current_trace.set(trace)
            done = await ref.ask(Run("context"), block=False)
        assert done.value == (Trace("two", None), {"trace_id": "two"}, "probe")
        await ref.stop(block=False)
        assert ended == [(None, {}, "probe")]

    run_virtual(main())


def test_logs_name_the_actor_and_the_trace() -> None:
    async def main() -> None:
        system = make_system()
        ref = Probe.start(system)
        current_trace.set(Trace("t", 3))
        await ref.ask(Run("log_something"), block=False)
        assert log_of(system).named("something") == [
            {"actor": "probe", "trace_id": "t", "version": 3, "field": 1}
        ]

    run_virtual(main())


def test_after_tells_it_later_under_the_same_trace() -> None:
    async def main() -> None:
        system = make_system()
        probes: list[Probe] = []

        class Known(Probe):
            def on_start(self) -> None:
                probes.append(self)

        ref = Known.start(system)
        current_trace.set(Trace("t", None))
        await ref.ask(Run("set_timer"), block=False)
        await asyncio.sleep(11)
        assert probes[0].notes == [(10, Trace("t", None))]
        await ref.ask(Run("set_timer"), block=False)
        await ref.stop(block=False)
        await asyncio.sleep(11)
        assert len(probes[0].notes) == 1
        assert system.dead_letters.total == 0

    run_virtual(main())
