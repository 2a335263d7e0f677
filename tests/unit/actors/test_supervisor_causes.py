"""Which of several ends of children a supervisor judges, and which one it names as the cause."""

from __future__ import annotations

import asyncio

from tests.helpers.scripted_children import World, scenario

from ratchet.actors.restarts import End

# --- ends at the same time


def test_an_end_during_a_stop_is_not_judged() -> None:
    async def body(world: World) -> None:
        world["c"].stop_takes_s = 2.0
        world["b"].end()
        await asyncio.sleep(1.0)
        world["c"].end(reason="crashed while it stopped")
        await asyncio.sleep(10)
        assert world.what() == ["stop c", "start b", "start c"]

    scenario(body, strategy="rest_for_one", max_restarts=1)


def test_an_end_of_another_during_a_stop_is_judged_after_it() -> None:
    async def body(world: World) -> None:
        world["c"].stop_takes_s = 2.0
        world["b"].end()
        await asyncio.sleep(1.0)
        world["a"].end()
        await asyncio.sleep(0.5)
        assert world.what() == ["stop c"]
        await asyncio.sleep(10)
        assert world.what() == ["start a", "start b", "start c"]

    scenario(body, strategy="rest_for_one", max_restarts=2)


def test_of_ends_at_one_moment_that_of_the_earlier_child_is_the_cause() -> None:
    async def body(world: World) -> End:
        for name in "cba":
            world[name].end()
        return await world.supervisor.ended()

    assert scenario(body, max_restarts=0) == End("root", "abnormal", "a broke")


# --- cause and consequence


def test_a_cause_that_is_heard_of_within_the_grace_comes_before_its_consequence() -> None:
    async def body(world: World) -> End:
        world["c"].end("consequence", "c has lost a")
        await asyncio.sleep(0.99)
        world["a"].end("abnormal", "a died of signal 9")
        return await world.supervisor.ended()

    assert scenario(body, max_restarts=0).reason == "a died of signal 9"


def test_a_consequence_without_a_cause_is_judged_after_the_grace() -> None:
    async def body(world: World) -> tuple[float, End]:
        began = asyncio.get_running_loop().time()
        world["c"].end("consequence", "c has lost a")
        end = await world.supervisor.ended()
        return asyncio.get_running_loop().time() - began, end

    took_s, end = scenario(body, max_restarts=0)
    assert took_s == 1.0
    assert end == End("root", "abnormal", "c has lost a")


def test_a_stop_within_the_grace_makes_it_no_failure() -> None:
    async def body(world: World) -> End:
        world["c"].end("consequence", "c was stopped from outside")
        await asyncio.sleep(0.5)
        await world.supervisor.stop()
        assert world.what() == ["stop c", "stop b", "stop a"]  # c is told, and has ended already
        return await world.supervisor.ended()

    assert scenario(body, max_restarts=0).kind == "normal"
