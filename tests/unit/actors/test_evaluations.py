from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config
from tests.simulation.loop import run_virtual

from ratchet.actors.evaluation import Evaluation
from ratchet.actors.evaluations import Evaluations
from ratchet.actors.publisher import Published
from ratchet.types import RoleInfo

ENGINES = [RoleInfo("rollout", f"rollout-{i}", "a") for i in range(5)]
OWN = [RoleInfo("evaluator", f"evaluator-{i}", "a") for i in range(2)]
LASTS_S = 10.0


class World:
    """A publisher whose versions are their steps, and engines that need a while."""

    def __init__(self, first: int = 0, **config: Any) -> None:
        section = {"num_prompts": 8, "every_steps": 2, "timeout_s": 30.0} | config
        self.log = RecordingLog()
        self.lines: list[Mapping[str, Any]] = []
        self.released: list[tuple[float, str]] = []
        self.evaluated: list[tuple[int, list[str]]] = []
        self.catches: list[Published | None] = []
        self.caught_up: list[str] = []
        self.accuracy: float | None = 0.5
        self.pins: Any = None
        self.lineage = self
        self.live: int | None = None
        double: Any = self
        self.evaluations = Evaluations(
            small_config(eval=section, trainer={"num_steps": 100}),
            publisher=double,
            evaluate=self.evaluate,
            spawn=lambda coro, *, name: asyncio.get_running_loop().create_task(coro, name=name),
            now=self.now,
            log=self.log,
            write=self.lines.append,
            released=lambda engine: self.released.append((self.now(), engine.name)),
        )
        assert self.pins is self.evaluations
        self.evaluations.live(first, ENGINES)
        assert not self.evaluations.running  # the first is left to `run`

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def step(self, version: int) -> int:
        return version

    async def catch_up(self, engine: RoleInfo) -> Published | None:
        self.caught_up.append(engine.name)
        return self.catches.pop(0)

    async def evaluate(
        self,
        version: int,
        engines: Sequence[RoleInfo],
        *,
        ended: Callable[[RoleInfo], None],
    ) -> Evaluation:
        self.evaluated.append((version, [engine.name for engine in engines]))
        for engine in engines:
            await asyncio.sleep(LASTS_S)
            ended(engine)
        num = 0 if self.accuracy is None else 8
        return Evaluation(version, self.accuracy, num, 8 - num)


def scenario(body: Callable[[World], Awaitable[None]], **config: Any) -> None:
    async def main() -> None:
        await body(World(**config))

    run_virtual(main())


@pytest.mark.parametrize(("holders", "lent"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_at_most_half_of_the_holders_are_lent_or_the_only_one(holders: int, lent: int) -> None:
    async def body(world: World) -> None:
        world.evaluations.live(2, ENGINES[:holders][::-1])
        pinned = [engine for engine in ENGINES if world.evaluations.pinned(engine)]
        assert pinned == ENGINES[:lent]  # at once, before anyone can offer them another version
        await world.evaluations.ended()
        assert world.evaluated == [(2, [engine.name for engine in ENGINES[:lent]])]
        assert (
            world.released
            == [  # each as soon as it is done
                (LASTS_S * (i + 1), engine.name) for i, engine in enumerate(ENGINES[:lent])
            ]
        )
        assert not any(map(world.evaluations.pinned, ENGINES))

    scenario(body)


def test_the_first_version_of_each_period_is_due() -> None:
    async def body(world: World) -> None:
        for version in (1, 3, 3, 4, 5, 9, 10, 99, 100):
            world.evaluations.live(version, ENGINES[:1])
            await world.evaluations.ended()
        # 2 went live nowhere; of 9 and 10 each has its own; 100 is the last one, left to `run`
        assert [version for version, _ in world.evaluated] == [3, 4, 9, 10, 99]
        assert world.evaluations.num_skipped == 0

    scenario(body)


def test_a_run_that_goes_on_from_a_checkpoint_keeps_its_periods() -> None:
    async def body(world: World) -> None:
        for version in (50, 51, 52):
            world.evaluations.live(version, ENGINES[:1])
            await world.evaluations.ended()
        assert [version for version, _ in world.evaluated] == [52]

    scenario(body, first=50)


def test_no_two_run_at_once() -> None:
    async def body(world: World) -> None:
        world.evaluations.live(2, ENGINES[:2])
        await asyncio.sleep(LASTS_S / 2)
        world.evaluations.live(4, ENGINES[:2])
        world.evaluations.live(6, ENGINES[:2])
        assert world.evaluations.num_skipped == 2
        assert not world.evaluations.pinned(ENGINES[1])
        skipped = world.log.named("evaluation_skipped")
        assert [(each["version"], each["step"]) for each in skipped] == [(4, 4), (6, 6)]
        await world.evaluations.ended()
        world.evaluations.live(7, ENGINES[:2])  # the period of 6 is spent
        assert not world.evaluations.running
        world.evaluations.live(8, ENGINES[:2])
        await world.evaluations.ended()
        assert [version for version, _ in world.evaluated] == [2, 8]
        assert [line["num_skipped"] for line in world.lines] == [2, 2]

    scenario(body)


def test_without_a_period_nothing_is_due() -> None:
    async def body(world: World) -> None:
        world.evaluations.live(4, ENGINES)
        assert not world.evaluations.running
        assert not any(map(world.evaluations.pinned, ENGINES))

    scenario(body, every_steps=0)


def test_what_could_not_be_scored_is_written_and_is_no_result() -> None:
    async def body(world: World) -> None:
        world.accuracy = None
        assert await world.evaluations.run(2, ENGINES[:2]) is None
        (line,) = world.lines
        assert line == {
            "version": 2, "accuracy": None, "num_prompts": 0, "num_failed": 8, "step": 2,
            "seconds": 2 * LASTS_S, "num_engines": 2, "num_skipped": 0,
        }  # fmt: skip
        assert world.log.named("evaluated") == [line]
        assert world.released == []  # nobody was pinned

    scenario(body)


def test_own_engines_are_brought_to_one_version_and_nobody_is_lent() -> None:
    async def body(world: World) -> None:
        for engine in OWN:
            world.evaluations.joined(engine)
        world.catches = [
            Published(2, failed=(OWN[0],)), None,  # a step was first; and then nothing was live
            Published(4, ("evaluator-0",)), Published(5, ("evaluator-1",)),
        ]  # fmt: skip
        world.evaluations.live(2, ENGINES)
        assert not any(map(world.evaluations.pinned, ENGINES))
        await world.evaluations.ended()
        assert world.caught_up == ["evaluator-0", "evaluator-1"] * 2
        assert world.now() == pytest.approx(1.0 + LASTS_S)
        assert world.evaluated == [(5, ["evaluator-1"])]
        assert world.lines[0]["version"] == 5

    scenario(body, engines="own")


def test_an_own_engine_that_a_step_was_ahead_of_tries_the_next_version_at_once() -> None:
    async def body(world: World) -> None:
        world.evaluations.joined(OWN[0])
        world.catches = [Published(2, failed=(OWN[0],)), Published(3, ("evaluator-0",))]
        world.evaluations.live(2, ENGINES)
        await world.evaluations.ended()
        assert world.evaluated == [(3, ["evaluator-0"])]
        assert world.now() == pytest.approx(LASTS_S)

    scenario(body, engines="own")


def test_without_an_own_engine_in_time_the_evaluation_is_skipped() -> None:
    async def body(world: World) -> None:
        world.evaluations.joined(OWN[0])
        world.evaluations.left(OWN[0])
        world.evaluations.live(2, ENGINES)
        await world.evaluations.ended()
        assert world.now() == pytest.approx(30.0)
        assert world.evaluated == []
        (skipped,) = world.log.named("evaluation_skipped")
        assert skipped["reason"] == "no engine of its own took a version in time"
        assert world.evaluations.num_skipped == 1

    scenario(body, engines="own")
