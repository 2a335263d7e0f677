from __future__ import annotations

import asyncio

import pytest
from tests.helpers.actors import RecordingLog, make_system
from tests.helpers.refs import RecordedDirectory
from tests.simulation.loop import run_virtual

from ratchet.actors.role import RoleActor, rollout_name
from ratchet.actors.system import System
from ratchet.errors import ActorDead, GivenUp, RunFailed, VersionError
from ratchet.messages import Down, Message, RegisterRole, RoleLeft, RoleRegistered, RunEnded
from ratchet.types import RoleInfo

ROLE = RoleInfo("rollout", rollout_name(3), "life-1")
OTHER = RoleInfo("rollout", rollout_name(7), "life-1")
BUFFER = RoleInfo("buffer", "buffer", "b1")


class Member(RoleActor[RoleRegistered | RoleLeft | Down]):
    def __init__(self, system: System, role: RoleInfo) -> None:
        super().__init__(system, role)
        self.heard: list[Message] = []

    def receive(self, message: RoleRegistered | RoleLeft | Down) -> None:
        match message:
            case Down():
                self.down(message)
            case RoleRegistered() | RoleLeft():
                self.heard.append(message)


def test_it_registers_under_its_own_name_and_hears_who_is_there() -> None:
    async def main() -> None:
        others = RecordedDirectory()
        reply = RoleRegistered((RoleInfo("buffer", "buffer", "b"),), ())
        others.ref("registry").answer = lambda _: reply
        system = make_system(remote=others)
        ref = Member.start(system, ROLE)
        await asyncio.sleep(1)
        assert ref.name == "rollout-3"
        assert others.ref("registry").told == [RegisterRole(ROLE)]
        assert ref._actor_weakref().heard == [reply]
        assert system.waits.rows() == []
        await ref.stop(block=False)

    run_virtual(main())


def test_a_registry_that_refuses_fails_the_role() -> None:
    def refuse(error: Exception) -> RecordedDirectory:
        def answer(_: Message) -> Message:
            raise error

        others = RecordedDirectory()
        others.ref("registry").answer = answer
        return others

    async def main() -> None:
        log = RecordingLog()
        for error in (VersionError("no"), GivenUp("too late")):
            ref = Member.start(make_system(remote=refuse(error), log=log), ROLE)
            await asyncio.sleep(1)
            assert not ref.is_alive()
        reasons = [event["reason"] for event in log.named("actor_failed")]
        lost = "RunFailed: rollout-3 has lost the registry: too late"
        assert reasons == ["VersionError: no", lost]

    run_virtual(main())


def test_a_registry_that_is_away_is_waited_for_visibly_and_not_for_ever() -> None:
    async def main() -> None:
        log = RecordingLog()
        system = make_system(log=log, registry_wait_s=20.0)
        ref = Member.start(system, ROLE)
        await asyncio.sleep(19.5)
        (row,) = system.waits.rows()
        wanted = ("rollout-3", "registry", "its next life, for RegisterRole")
        assert (row.who, row.on, row.what, row.until) == (*wanted, 20.0)
        assert ref.is_alive()
        await asyncio.sleep(1)
        assert not ref.is_alive()
        (failed,) = log.named("actor_failed")
        assert failed["reason"] == (
            "RunFailed: rollout-3 has lost the registry: it has not answered RegisterRole within"
            " 20 s (runtime.registry_wait_s): there is no actor registry"
        )

    run_virtual(main())


class Registry:
    """Knows some roles; is away for a while."""

    def __init__(self, *known: RoleInfo) -> None:
        self.others = RecordedDirectory()
        self.known = known
        self.away = False
        self.others.ref("registry").answer = self._answer

    def _answer(self, message: Message) -> Message:
        assert message == RegisterRole(ROLE)
        if self.away:
            raise ActorDead("registry has ended")
        return RoleRegistered((*self.known, ROLE), ())

    async def dies(self, for_s: float) -> None:
        self.away = True
        for watcher in self.others.ref("registry").watchers:
            watcher.tell(Down("registry", "killed"))
        await asyncio.sleep(for_s)
        self.away = False
        await asyncio.sleep(1)

    def watched(self, name: str) -> int:
        return len(self.others.ref(name).watchers)


def test_it_registers_again_with_the_next_life_of_the_registry() -> None:
    async def main() -> None:
        registry = Registry(BUFFER)
        ref = Member.start(make_system(remote=registry.others), ROLE)
        await asyncio.sleep(1)
        actor = ref._actor_weakref()
        await registry.dies(for_s=30)
        assert len(actor.heard) == 2
        assert registry.watched("registry") == 2  # the new one
        assert registry.watched("buffer") == 0
        assert actor.life_of("buffer") == "b1"
        assert actor.life_of("nobody") == ""
        await ref.stop(block=False)

    run_virtual(main())


def test_whoever_the_next_registry_does_not_know_has_left_once_its_link_says_so() -> None:
    async def main() -> None:
        registry = Registry(BUFFER, OTHER)
        ref = Member.start(make_system(remote=registry.others), ROLE)
        await asyncio.sleep(1)
        actor = ref._actor_weakref()
        registry.known = ()
        await registry.dies(for_s=1)
        assert (registry.watched("buffer"), registry.watched("rollout-7")) == (1, 1)
        actor.learn(OTHER)  # it has registered as well, only later
        ref.tell(Down("buffer", "killed"))
        await asyncio.sleep(1)
        assert actor.heard[2:] == [RoleLeft(BUFFER, "killed")]
        ref.tell(Down("buffer", "told twice"))
        actor.left(OTHER)
        ref.tell(Down("rollout-7", "killed"))  # the registry has told already
        await asyncio.sleep(1)
        assert len(actor.heard) == 3
        await ref.stop(block=False)

    run_virtual(main())


def test_the_end_of_another_process_of_its_name_is_not_that_of_one_that_has_registered() -> None:
    # the trainer lost its only engine by it, and waited for one although that held its weights
    async def main() -> None:
        registry = Registry(OTHER)
        ref = Member.start(make_system(remote=registry.others), ROLE)
        await asyncio.sleep(1)
        actor = ref._actor_weakref()
        registry.known = ()
        await registry.dies(for_s=1)
        actor.learn(OTHER)
        ref.tell(Down("rollout-7", "a newer process has taken the name"))
        await asyncio.sleep(1)
        assert actor.heard == [RoleRegistered((OTHER, ROLE), ()), RoleRegistered((ROLE,), ())]
        await ref.stop(block=False)

    run_virtual(main())


def test_whoever_was_replaced_while_the_registry_was_away_has_left() -> None:
    async def main() -> None:
        registry = Registry(BUFFER)
        ref = Member.start(make_system(remote=registry.others), ROLE)
        await asyncio.sleep(1)
        actor = ref._actor_weakref()
        registry.known = (RoleInfo("buffer", "buffer", "b2"),)
        await registry.dies(for_s=1)
        left = RoleLeft(BUFFER, "replaced by a new incarnation")
        assert actor.heard[1:] == [left, RoleRegistered((*registry.known, ROLE), ())]
        actor.left(BUFFER)
        assert actor.life_of("buffer") == "b2"
        await ref.stop(block=False)

    run_virtual(main())


def test_what_is_heard_while_it_registers_is_newer_than_the_reply() -> None:
    async def main() -> None:
        registry = Registry(BUFFER)
        reply = asyncio.get_running_loop().create_future()
        registry.others.ref("registry").answer = lambda _: reply
        ref = Member.start(make_system(remote=registry.others), ROLE)
        await asyncio.sleep(1)
        actor = ref._actor_weakref()
        actor.learn(RoleInfo("buffer", "buffer", "b2"))
        reply.set_result(RoleRegistered((BUFFER, ROLE), ()))
        await asyncio.sleep(1)
        assert actor.life_of("buffer") == "b2"
        await ref.stop(block=False)

    run_virtual(main())


def test_after_the_end_of_the_run_nobody_looks_for_the_registry() -> None:
    async def main() -> None:
        registry = Registry(BUFFER)
        system = make_system(remote=registry.others)
        ref = Member.start(system, ROLE)
        await asyncio.sleep(1)
        system.run_ended = RunEnded("finished", "done")
        await registry.dies(for_s=1)
        assert registry.others.ref("registry").told == [RegisterRole(ROLE)]
        assert ref.is_alive()
        await ref.stop(block=False)

    run_virtual(main())


def test_a_wait_is_visible_while_it_lasts_and_ends_by_its_deadline() -> None:
    async def main() -> None:
        others = RecordedDirectory()
        others.ref("registry").answer = lambda _: RoleRegistered((), ())
        system = make_system(remote=others)
        ref = Member.start(system, ROLE)
        await asyncio.sleep(1)
        actor = ref._actor_weakref()
        event = asyncio.Event()
        waiting = asyncio.ensure_future(
            actor.wait_for(event.wait(), on="buffer", what="a sign", within_s=5.0)
        )
        await asyncio.sleep(1)
        (row,) = system.waits.rows()
        assert row == ("rollout-3", "buffer", "a sign", 1.0, 6.0)
        event.set()
        assert await waiting is True
        assert system.waits.rows() == []
        event.clear()
        with pytest.raises(RunFailed, match=r"rollout-3 waited 5\.0 s .* on buffer for a sign"):
            await actor.wait_for(event.wait(), on="buffer", what="a sign", within_s=5.0)
        assert asyncio.get_running_loop().time() == 7.0
        assert system.waits.rows() == []
        await ref.stop(block=False)

    run_virtual(main())


def test_one_whose_name_another_has_taken_does_not_wait_for_it() -> None:
    def refuse(_: Message) -> Message:
        raise ActorDead("registry refuses the link: a newer process has taken the name rollout-3")

    async def main() -> None:
        others = RecordedDirectory()
        others.ref("registry").answer = refuse
        log = RecordingLog()
        ref = Member.start(make_system(remote=others, log=log), ROLE)
        await asyncio.sleep(0.1)
        assert not ref.is_alive()
        (failed,) = log.named("actor_failed")
        assert "a newer process has taken the name rollout-3" in failed["reason"]

    run_virtual(main())
