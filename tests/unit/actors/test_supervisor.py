"""The supervisor: how it starts and stops its children, in which order, and starts that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.helpers.scripted_children import World, scenario, settle, world
from tests.simulation.loop import run_virtual

from ratchet.actors.restarts import End

# --- order


def test_a_stop_is_in_reverse_order_one_after_the_other_and_no_failure() -> None:
    async def body(world: World) -> None:
        for name in "abc":
            world[name].stop_takes_s = 1.0
        await world.supervisor.stop()
        assert [(round(at), what) for at, what in world.take()] == [
            (0, "stop c"),
            (1, "stop b"),
            (2, "stop a"),
        ]
        assert await world.supervisor.ended() == End("root", "normal", "stopped")
        assert world.log.named("child_ended") == []

    scenario(body)


def test_children_that_do_not_depend_on_each_other_stop_side_by_side() -> None:
    async def body(world: World) -> None:
        for name in "abc":
            world[name].stop_takes_s = 1.0
        began = asyncio.get_running_loop().time()
        await world.supervisor.stop()
        assert world.what() == ["stop c", "stop b", "stop a"]
        assert asyncio.get_running_loop().time() - began == 1.0

    scenario(body, stops_together=True)


@pytest.mark.parametrize(
    ("strategy", "done"),
    [
        ("one_for_one", ["start b"]),
        ("one_for_all", ["stop c", "stop a", "start a", "start b", "start c"]),
        ("rest_for_one", ["stop c", "start b", "start c"]),
    ],
)
def test_each_strategy(strategy: str, done: list[str]) -> None:
    async def body(world: World) -> None:
        world["b"].end()
        await settle()
        assert world.what() == done
        await world.supervisor.stop()
        assert world.what() == ["stop c", "stop b", "stop a"]

    scenario(body, strategy=strategy, max_restarts=1)  # the siblings' ends do not count


# --- time


def test_backoff_is_exact() -> None:
    async def body(world: World) -> None:
        pauses = []
        for _ in range(5):
            await asyncio.sleep(1.0)
            world["b"].end()
            ended = asyncio.get_running_loop().time()
            await asyncio.sleep(10)
            ((at, what),) = world.take()
            assert what == "start b"
            pauses.append(round(at - ended, 6))
        assert pauses == [0.5, 1.0, 2.0, 3.0, 3.0]

    scenario(body, backoff_first_s=0.5, backoff_most_s=3.0)


def test_a_child_that_hangs_in_its_stop_is_killed_after_its_time() -> None:
    async def body(world: World) -> None:
        world["b"].stop_takes_s = None
        await world.supervisor.stop()
        assert [(round(at, 2), what) for at, what in world.take()] == [
            (0.0, "stop c"),
            (0.0, "stop b"),
            (5.0, "kill b"),
            (5.0, "stop a"),
        ]
        (killed,) = world.log.named("child_killed")
        assert (killed["name"], killed["after_s"]) == ("b", 5.0)

    scenario(body)


def test_a_restart_that_waits_is_not_done_after_a_stop() -> None:
    async def body(world: World) -> None:
        world["b"].end()
        await settle()
        await world.supervisor.stop()
        await asyncio.sleep(100)
        assert world.what() == ["stop c", "stop a"]

    scenario(body, backoff_first_s=10.0, backoff_most_s=10.0)


def test_nothing_is_polled() -> None:
    async def main() -> int:
        made = world()
        await made.supervisor.start()
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1

        loop: Any = asyncio.get_running_loop()
        select = loop._selector.select
        loop._selector.select = lambda timeout=None: (turn(), select(timeout))[1]
        await asyncio.sleep(86400.0)
        return turns

    assert run_virtual(main()) < 10


# --- starts that fail


def test_a_start_that_raises_is_tried_again_as_an_end() -> None:
    async def main() -> None:
        made = world(backoff_first_s=1.0, backoff_most_s=1.0)
        made["b"].refusals = 2
        await made.supervisor.start()
        await asyncio.sleep(10)
        assert [(round(at), what) for at, what in made.take()] == [
            (0, "start a"), (0, "start b"), (0, "start c"), (1, "start b"), (2, "start b"),
        ]  # fmt: skip

    run_virtual(main())


def test_a_start_that_always_raises_is_the_cause_in_the_end() -> None:
    async def main() -> None:
        made = world(max_restarts=2, strategy="one_for_all")
        made["b"].refusals = 10
        await made.supervisor.start()
        end = await made.supervisor.ended()
        assert end.kind == "abnormal"
        assert end.reason == (
            "b could not start: OSError: no process to be had (the first of 3 ends of root within"
            " 60 s, of which max_restarts allows 2)"
        )
        assert made.what() == ["start a", "start b", "stop a"] * 3  # and never c

    run_virtual(main())
