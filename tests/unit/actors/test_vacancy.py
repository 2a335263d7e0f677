"""A run waits for its trainer, visibly, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from tests.helpers.actors import make_system
from tests.simulation.loop import run_virtual

from ratchet.actors.vacancy import Vacancy
from ratchet.types import RoleInfo

FIRST, SECOND = RoleInfo("trainer", "trainer-0", "a"), RoleInfo("trainer", "trainer-0", "b")
WAIT_S = 60.0


class Scene:
    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.system = make_system()
        self.missed: list[tuple[float, str]] = []
        self.vacancy = Vacancy(
            self.system,
            wait_s=WAIT_S,
            now=loop.time,
            missed=lambda why: self.missed.append((loop.time(), why)),
        )

    def waits_on(self) -> list[str]:
        return [row.on for row in self.system.waits.rows()]


def play(body: Callable[[Scene], Awaitable[None]]) -> Scene:
    async def main() -> Scene:
        scene = Scene()
        await body(scene)
        await asyncio.sleep(10 * WAIT_S)
        scene.vacancy.close()
        assert scene.waits_on() == []
        return scene

    return run_virtual(main())


def test_a_trainer_that_is_gone_is_waited_for_until_the_deadline() -> None:
    async def body(scene: Scene) -> None:
        scene.vacancy.joined(FIRST)
        assert scene.waits_on() == []
        scene.vacancy.left(FIRST, "silent for 15 s")
        assert scene.waits_on() == ["trainer-0"]

    ((at, why),) = play(body).missed
    assert at == WAIT_S
    assert why == (
        "trainer-0 is gone (silent for 15 s), and no trainer has come within 60 s"
        " (runtime.trainer_wait_s)"
    )


@pytest.mark.parametrize("successor", [SECOND, RoleInfo("trainer", "trainer-7", "c")])
def test_another_one_ends_the_wait(successor: RoleInfo) -> None:
    async def body(scene: Scene) -> None:
        scene.vacancy.joined(FIRST)
        scene.vacancy.left(FIRST, "its process has ended")
        await asyncio.sleep(WAIT_S - 1)
        scene.vacancy.joined(successor)
        assert scene.waits_on() == []
        scene.vacancy.left(FIRST, "told twice")
        scene.vacancy.left(RoleInfo("rollout", "rollout-0", "r"), "silent")

    assert play(body).missed == []


def test_one_that_leaves_in_order_or_while_another_is_there_is_not_missed() -> None:
    async def body(scene: Scene) -> None:
        scene.vacancy.joined(FIRST)
        scene.vacancy.joined(SECOND)
        scene.vacancy.left(FIRST, "replaced by a new incarnation")
        scene.vacancy.left(SECOND, "stopped")

    assert play(body).missed == []


def test_a_registry_that_starts_again_waits_for_the_trainer_that_it_has_not_seen() -> None:
    async def body(scene: Scene) -> None:
        scene.vacancy.open()

    ((_, why),) = play(body).missed
    assert "none has registered since the registry started" in why
