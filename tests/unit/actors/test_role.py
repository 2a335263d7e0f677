from __future__ import annotations

import asyncio

import pytest
from tests.helpers.actors import RecordingLog, make_system
from tests.helpers.refs import RecordedDirectory
from tests.simulation.loop import run_virtual

from ratchet.actors.role import RoleActor, rollout_name
from ratchet.actors.system import System
from ratchet.errors import RunFailed, VersionError
from ratchet.messages import Down, Message, RegisterRole, RoleRegistered
from ratchet.types import RoleInfo

ROLE = RoleInfo("rollout", rollout_name(3), "life-1")


class Member(RoleActor[RoleRegistered | Down]):
    def __init__(self, system: System, role: RoleInfo) -> None:
        super().__init__(system, role)
        self.heard: list[Message] = []

    def receive(self, message: RoleRegistered | Down) -> None:
        match message:
            case Down():
                self.registry_lost(message)
            case RoleRegistered():
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


def test_a_registry_that_refuses_or_is_not_there_fails_the_role() -> None:
    def refuse(_: Message) -> Message:
        raise VersionError("no")

    async def main() -> None:
        others = RecordedDirectory()
        others.ref("registry").answer = refuse
        log = RecordingLog()
        refused = Member.start(make_system(remote=others, log=log), ROLE)
        alone = Member.start(make_system(log=log), ROLE)
        await asyncio.sleep(1)
        assert not refused.is_alive()
        assert not alone.is_alive()
        reasons = [event["reason"] for event in log.named("actor_failed")]
        assert sorted(reasons) == ["ActorDead: there is no actor registry", "VersionError: no"]

    run_virtual(main())


@pytest.mark.parametrize(("reason", "lives"), [("stopped", True), ("silent for 30 s", False)])
def test_it_ends_when_it_loses_the_registry_but_not_when_that_stops(
    reason: str, lives: bool
) -> None:
    async def main() -> None:
        others = RecordedDirectory()
        registry = others.ref("registry")
        registry.answer = lambda _: RoleRegistered((), ())
        log = RecordingLog()
        ref = Member.start(make_system(remote=others, log=log), ROLE)
        await asyncio.sleep(1)
        (watcher,) = registry.watchers
        watcher.tell(Down("registry", reason))
        await asyncio.sleep(1)
        assert ref.is_alive() is lives
        reasons = [event["reason"] for event in log.named("actor_failed")]
        lost = "RunFailed: rollout-3 has lost the registry: silent for 30 s"
        assert reasons == ([] if lives else [lost])
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
