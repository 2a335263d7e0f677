from __future__ import annotations

import asyncio
import contextvars
import gc
from typing import Any, assert_never

import pykka
import pytest
import structlog.contextvars
from tests.helpers.actors import RecordingLog, make_system
from tests.simulation.loop import run_virtual

from ratchet.actors.actor import Actor, Answer
from ratchet.actors.life import YIELD_EVERY
from ratchet.actors.system import System, Wait, current_actor
from ratchet.errors import ActorDead, AskTimeout, HandlerFailed
from ratchet.messages import Ask, Message
from ratchet.transport.mailbox.base import Trace, current_trace


class Done(Message, frozen=True):
    value: Any = None


class Run(Ask[Done], frozen=True):
    what: str
    to: str = ""


class Tick(Message, frozen=True):
    what: str = ""


class Unknown(Ask[Done], frozen=True):
    pass


class Probe(Actor[Run | Tick]):
    """Runs the method that a message names, and answers with what it returns."""

    def __init__(self, system: System, name: str = "probe") -> None:
        super().__init__(system, name)
        self.notes: list[Any] = []

    def receive(self, message: Run | Tick) -> Answer:
        match message:
            case Tick():
                if message.what:
                    getattr(self, message.what)()
                self.notes.append((self.now(), current_trace.get()))
                return None
            case Run():
                answer = getattr(self, message.what)(*([message.to] if message.to else []))
                if asyncio.iscoroutine(answer):
                    return self.spawn(answer, name=message.what)
                return Done(answer)
            case _:
                assert_never(message)

    def context(self) -> Any:
        return current_trace.get(), structlog.contextvars.get_contextvars(), current_actor.get()

    async def child_context(self) -> Done:
        before = self.context()
        await asyncio.sleep(1)
        assert self.context() == before
        return Done(before)

    async def ask_other(self, to: str) -> Done:
        return await self.ask(self.system.ref(to), Run("context"))

    async def ask_nothing(self, to: str) -> Done:
        return await self.ask(self.system.ref(to), Run("hang"), timeout=4)

    async def ask_back(self, to: str) -> Done:
        """Make the other one ask me something that I never answer."""
        back = "ask_b" if to == "b" else "ask_a"
        return await self.ask(self.system.ref(to), Run(back), timeout=5)

    async def ask_a(self) -> Done:
        return await self.ask(self.system.ref("a"), Run("hang"), timeout=9)

    async def ask_b(self) -> Done:
        return await self.ask(self.system.ref("a"), Run("hang"), timeout=9)

    async def hang(self) -> Done:
        await asyncio.Event().wait()
        raise AssertionError

    def forward(self, to: str) -> Any:
        return self.system.ref(to).ask(Run("context"), block=False)

    def set_timer(self) -> None:
        self.after(10, Tick())

    def log_something(self) -> None:
        self.log.info("something", field=1)


def log_of(system: System) -> RecordingLog:
    assert isinstance(system.log, RecordingLog)
    return system.log


def test_the_urn_comes_from_the_system() -> None:
    async def main() -> None:
        ref = Probe.start(make_system(new_id=lambda: "made-here"))
        assert ref.actor_urn == "made-here"
        assert str(ref) == "Probe probe (made-here)"
        assert pykka.ActorRegistry.get_by_urn("made-here") is ref
        await ref.stop(block=False)

    run_virtual(main())


def test_two_living_actors_cannot_have_one_name() -> None:
    async def main() -> None:
        system = make_system()
        ref = Probe.start(system)
        before = pykka.ActorRegistry.get_all()
        with pytest.raises(ValueError, match="an actor named 'probe' already runs"):
            Probe.start(system)
        assert pykka.ActorRegistry.get_all() == before
        assert await ref.ask(Run("context"), block=False)

    run_virtual(main())


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


def test_a_ref_does_not_keep_a_dead_actor_in_memory() -> None:
    async def main() -> None:
        ref = Probe.start(make_system())
        actor = ref._actor_weakref
        assert actor() is not None
        await ref.ask(Run("context"), block=False)
        await ref.stop(block=False)
        await asyncio.sleep(0)
        gc.collect()
        assert actor() is None
        assert not ref.is_alive()

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


def test_an_unknown_message_is_a_dead_letter_and_an_error_to_the_asker() -> None:
    async def main() -> None:
        system = make_system()
        ref = Probe.start(system)
        ref.tell(Unknown())
        with pytest.raises(HandlerFailed, match="probe does not accept Unknown"):
            await ref.ask(Unknown(), block=False)
        assert system.dead_letters.counts == {("probe", "Unknown", "not accepted"): 2}
        assert len(log_of(system).named("dead_letter")) == 2
        assert ref.is_alive()

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


def test_an_awaitable_of_any_kind_may_be_the_answer() -> None:
    class Forwarding(Actor[Run]):
        def receive(self, message: Run) -> Answer:
            match message:
                case Run(what="future"):
                    future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
                    asyncio.get_running_loop().call_later(1, future.set_result, Done(1))
                    return future
                case Run():
                    return self.system.ref("probe").ask(Run("context"), block=False)

    async def main() -> None:
        system = make_system()
        Probe.start(system)
        ref = Forwarding.start(system, "forwarding")
        assert (await ref.ask(Run("future"), block=False)).value == 1
        assert (await ref.ask(Run("reply"), block=False)).value[2] == "probe"
        waiting = ref.ask(Run("future"), block=False)
        ref.stop(block=False)
        with pytest.raises(ActorDead, match="forwarding stopped before it had the reply"):
            await waiting

    run_virtual(main())


def test_waits_are_in_the_table_while_they_last() -> None:
    async def main() -> None:
        system = make_system()
        ref, _ = Probe.start(system, "a"), Probe.start(system, "b")
        await asyncio.sleep(100)
        reply = ref.ask(Run("ask_nothing", "b"), block=False)
        await asyncio.sleep(1)
        assert system.waits.rows() == [Wait("a", "b", "Run", 100.0, 104.0)]
        with pytest.raises(AskTimeout, match=r"^a asked b for Run: no reply within 4 s$"):
            await reply
        assert asyncio.get_running_loop().time() == 104
        assert system.waits.rows() == []

    run_virtual(main())


def test_a_cycle_of_asks_ends_at_its_deadline_and_is_named() -> None:
    async def main() -> None:
        system = make_system()
        ref, _ = Probe.start(system, "a"), Probe.start(system, "b")
        with pytest.raises(AskTimeout, match=r"5 s; they wait in a cycle: a -> b -> a$"):
            await ref.ask(Run("ask_back", "b"), block=False)
        assert asyncio.get_running_loop().time() == 5

    run_virtual(main())


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


def test_spawn_after_the_end_starts_nothing() -> None:
    probes: list[Probe] = []

    class Known(Probe):
        def on_start(self) -> None:
            probes.append(self)

    async def main() -> None:
        ref = Known.start(make_system())
        await ref.stop(block=False)
        with pytest.raises(ActorDead, match="probe has stopped and does not start hang"):
            probes[0].spawn(probes[0].hang(), name="hang")

    run_virtual(main())


def test_on_start_may_await_and_comes_first() -> None:
    class Slow(Probe):
        async def on_start(self) -> None:
            await asyncio.sleep(3)
            self.notes.append("started")

        def first_note(self) -> Any:
            return self.notes[0], self.now()

    async def main() -> None:
        ref = Slow.start(make_system())
        done = await ref.ask(Run("first_note"), block=False)
        assert done.value == ("started", 3)

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
