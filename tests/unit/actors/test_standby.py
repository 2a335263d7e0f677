"""When a standby says that a trainer is missing, and when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.helpers.actors import RecordingLog, make_system
from tests.helpers.refs import RecordedDirectory
from tests.simulation.loop import run_virtual

from ratchet.actors.standby import StandbyActor
from ratchet.messages import Down, RoleJoined, RoleLeft, RoleRegistered, RunEnded
from ratchet.runtime.role import EndOfActor
from ratchet.types import RoleInfo, VersionRecord

RETURN_S = 5.0
ME = RoleInfo("standby", "standby-1", "s")
FIRST, SECOND = RoleInfo("trainer", "trainer-0", "a"), RoleInfo("trainer", "trainer-0", "b")
VERSION = VersionRecord(0, 1, 0, None, "live", "d", None, 0.0)


class Scene:
    def __init__(self, *roles: RoleInfo, trained: bool = True) -> None:
        others = RecordedDirectory()
        reply = RoleRegistered(roles, (VERSION,) if trained else ())
        others.ref("registry").answer = lambda _: reply
        self.system = make_system(remote=others, log=RecordingLog())
        self.vacant: list[tuple[float, str]] = []
        self.ref = StandbyActor.start(
            self.system,
            ME,
            return_s=RETURN_S,
            vacant=lambda why: self.vacant.append((asyncio.get_running_loop().time(), why)),
        )


def play(scene: Callable[[], Scene], body: Callable[[Scene], Awaitable[None]]) -> Scene:
    async def main() -> Scene:
        made = scene()
        await asyncio.sleep(1)
        await body(made)
        await asyncio.sleep(100)
        alive = made.ref.is_alive()
        assert alive == (not made.vacant and made.system.run_ended is None)
        if alive:
            await made.ref.stop(block=False)
        return made

    return run_virtual(main())


def test_it_takes_the_place_of_a_trainer_that_is_gone_and_does_not_return() -> None:
    async def body(scene: Scene) -> None:
        scene.ref.tell(RoleLeft(FIRST, "silent for 15 s"))

    vacant = play(lambda: Scene(FIRST), body).vacant
    assert vacant == [(1 + RETURN_S, "trainer-0 is gone: silent for 15 s")]


def test_one_that_comes_back_in_time_keeps_its_place() -> None:
    async def body(scene: Scene) -> None:
        scene.ref.tell(RoleLeft(FIRST, "its process has ended"))
        await asyncio.sleep(RETURN_S - 0.1)
        scene.ref.tell(RoleJoined(SECOND))

    assert play(lambda: Scene(FIRST), body).vacant == []


def test_the_end_of_an_older_life_is_no_news() -> None:
    async def body(scene: Scene) -> None:
        scene.ref.tell(RoleJoined(SECOND))
        scene.ref.tell(RoleLeft(FIRST, "replaced"))

    assert play(lambda: Scene(FIRST), body).vacant == []


def test_a_run_that_has_lost_its_trainer_before_is_taken_over_and_a_new_one_not_begun() -> None:
    async def body(scene: Scene) -> None:
        del scene

    assert play(lambda: Scene(trained=False), body).vacant == []
    assert [at for at, _ in play(Scene, body).vacant] == [RETURN_S]


def test_it_ends_with_the_run() -> None:
    async def body(scene: Scene) -> None:
        scene.ref.tell(RunEnded("finished", "9 steps"))

    ended = play(lambda: Scene(FIRST), body)
    assert ended.vacant == []
    assert ended.system.run_ended == RunEnded("finished", "9 steps")


def test_its_launcher_hears_of_its_end_also_after_the_registry_has_restarted() -> None:
    async def body(scene: Scene) -> None:
        end = EndOfActor(ME.name)
        scene.ref.watch(end)
        scene.ref.tell(Down("registry", "registry has restarted"))
        await asyncio.sleep(1)
        scene.ref.tell(RunEnded("finished", "9 steps"))
        assert await end.reason == "stopped"

    play(lambda: Scene(FIRST, ME), body)
