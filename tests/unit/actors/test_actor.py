from __future__ import annotations

import asyncio
import gc
from typing import Any

import pykka
import pytest
from tests.helpers.actors import make_system
from tests.helpers.probe import Done, Probe, Run, Unknown, log_of
from tests.simulation.loop import run_virtual

from ratchet.actors.actor import Actor, Answer
from ratchet.actors.system import Wait
from ratchet.errors import ActorDead, AskTimeout, HandlerFailed


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
