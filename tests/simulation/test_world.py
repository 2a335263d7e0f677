"""The four actors in virtual time: an hour of training in a moment, the same each time."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.helpers.config import small_config
from tests.simulation.lives import Delays, Links
from tests.simulation.loop import run_virtual
from tests.simulation.token_checks import check_trained_tokens
from tests.simulation.world import World

from ratchet.transport.mailbox.limits import Limits

STEP_S = 40.0
LIMITS = Limits(heartbeat_s=5.0, suspect_s=10.0, dead_s=30.0)


def simulate(
    seed: int,
    *,
    num_steps: int = 90,
    meanwhile: Callable[[World], Awaitable[None]] | None = None,
    delays: Delays = Delays(step_s=STEP_S, token_s=3.0),  # noqa: B008 - nobody changes it
    **sections: dict,
) -> tuple[World, float]:
    """Run a world to its end; return it and the virtual seconds it took."""
    config = small_config(
        trainer={"num_steps": num_steps, "batch_timeout_s": 1000.0} | sections.pop("trainer", {}),
        rollout={"max_tokens": 4, "group_size": 2, "num_workers": 2},
        buffer={"batch_groups": 4, "max_staleness": 2} | sections.pop("buffer", {}),
        eval={"num_prompts": 8},
        **sections,
    )

    async def main() -> tuple[World, float]:
        world = World(config, seed=seed, delays=delays, links=Links(LIMITS))
        world.start()
        if meanwhile is not None:
            await meanwhile(world)
        await world.ended.event.wait()
        return world, asyncio.get_running_loop().time()

    return run_virtual(main())


def check(world: World, num_steps: int) -> None:
    """What must hold at the end of any run."""
    (summary,) = world.output.summaries
    assert summary["status"] == "finished", summary
    assert summary["steps"] == num_steps
    versions = world.store.records()
    assert [v.version for v in versions] == list(range(len(versions)))
    assert {v.state for v in versions} <= {"live", "burnt"}
    digests = [v.digest for v in versions if v.state == "live"]
    assert len(set(digests)) == len(digests)
    assert versions[-1].step == num_steps
    steps = [line["step"] for line in world.output.lines]
    assert steps == list(range(1, num_steps + 1))
    bound = world.config.buffer.max_staleness
    assert max(line["buffer/staleness_max"] for line in world.output.lines) <= bound
    assert check_trained_tokens(world) > 0
    counts = world.ledger.counts()
    assert counts["trained"] == num_steps * world.config.buffer.batch_groups


def test_an_hour_of_training_in_a_moment_and_the_same_again() -> None:
    started = time.process_time()
    world, seconds = simulate(7)
    took = time.process_time() - started
    check(world, 90)
    assert seconds >= 3600
    # about one on a quiet core; what would be wrong is an order of magnitude more
    assert took < 5.0, f"{seconds:.0f} virtual seconds took {took:.2f} s of CPU"
    again, _ = simulate(7)
    assert world.network.trace == again.network.trace
    other, _ = simulate(8, num_steps=5)
    assert world.network.trace[: len(other.network.trace)] != other.network.trace


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policies")
def test_it_leaves_the_thread_that_runs_it_as_it_was() -> None:
    def policies() -> tuple[int, int]:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        before = os.sched_getscheduler(0)
        simulate(1, num_steps=3)
        return before, os.sched_getscheduler(0)

    with ThreadPoolExecutor(1) as pool:
        before, after = pool.submit(policies).result()
    assert after == before


def test_it_is_asynchronous_and_bounded() -> None:
    world, _ = simulate(1, num_steps=40)
    check(world, 40)
    lines = world.output.lines
    assert sum(line["buffer/two_version_rollouts"] for line in lines) > 0
    assert max(line["buffer/staleness_max"] for line in lines) > 0
    busy = [line["trainer_busy_share"] + line["rollout_busy_share"] for line in lines[5:]]
    assert sum(busy) / len(busy) > 1.3


def test_the_synchronous_baseline_is_never_stale_and_slower() -> None:
    apart, fast = simulate(2, num_steps=20)
    together, slow = simulate(2, num_steps=20, trainer={"synchronous": True})
    check(apart, 20)
    check(together, 20)
    assert {line["buffer/staleness_max"] for line in together.output.lines} == {0}
    assert slow > 1.3 * fast


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_killed_and_started_again_joins_at_the_live_version(seed: int) -> None:
    async def meanwhile(world: World) -> None:
        await asyncio.sleep(100 + seed)
        world.kill("rollout-0")

    world, _ = simulate(seed, num_steps=40, meanwhile=meanwhile)
    check(world, 40)
    assert world.ledger.reasons().keys() <= {"stale"}
    workers = [m for m in world.network.trace if m[1] == "rollout-0" and m[3] == "GroupFinished"]
    assert workers[-1][0] > 200


def test_a_worker_that_was_silent_too_long_ends_and_comes_back() -> None:
    async def meanwhile(world: World) -> None:
        await asyncio.sleep(100)
        world.network.silence("rollout-0", 35.0, inward=True, outward=True)

    world, _ = simulate(2, num_steps=20, meanwhile=meanwhile)
    check(world, 20)
    assert [name for name, reason in world.lost_workers if "lost the registry" in reason]
    finished = [m for m in world.network.trace if m[1:4:2] == ("rollout-0", "GroupFinished")]
    assert finished[-1][0] > 300


def test_all_workers_killed_at_once_are_started_again() -> None:
    async def meanwhile(world: World) -> None:
        await asyncio.sleep(100)
        world.kill("rollout-0")
        world.kill("rollout-1")

    world, _ = simulate(3, num_steps=20, meanwhile=meanwhile)
    check(world, 20)
    assert [life.name for life in world.lives] == ["rollout-0", "rollout-1"] * 2


def test_a_lost_transfer_burns_or_quarantines_and_the_next_one_works() -> None:
    async def meanwhile(world: World) -> None:
        for lose in ({"rollout-0"}, {"rollout-0", "rollout-1"}, {"rollout-1"}):
            await asyncio.sleep(60)
            world.wire.lose |= lose

    world, _ = simulate(4, num_steps=30, meanwhile=meanwhile)
    (summary,) = world.output.summaries
    assert summary["steps"] == 30
    states = [v.state for v in world.store.records()]
    assert states.count("burnt") == 1
    check_trained_tokens(world)


def test_with_a_snapshot_steps_overtake_transfers_and_an_engine_catches_up() -> None:
    async def meanwhile(world: World) -> None:
        await asyncio.sleep(60)
        world.kill("rollout-1")

    world, _ = simulate(
        5,
        num_steps=60,
        meanwhile=meanwhile,
        delays=Delays(step_s=2.0, token_s=0.1, move_s=6.0),
        buffer={"max_staleness": 6, "capacity_factor": 6.0},
        weights={"snapshot": True},
    )
    check(world, 60)
    versions = world.store.records()
    assert [v.state for v in versions].count("burnt") > 10
    assert versions[-1].state == "live"
    (summary,) = world.output.summaries
    assert summary["eval_after"]["version"] == versions[-1].version
    waits = [line["publish_s"] for line in world.output.lines]
    assert max(waits) < 1.0, "a step waited for a transfer"


def test_a_last_version_that_is_lost_is_offered_again_before_the_end() -> None:
    async def meanwhile(world: World) -> None:
        while (steps := len(world.output.lines)) < 6:
            if steps == 5:  # its transfer has ended; the one of step 6, the last, is lost
                world.wire.lose |= {"rollout-0", "rollout-1"}
            await asyncio.sleep(0.1)

    world, _ = simulate(6, num_steps=6, meanwhile=meanwhile)
    (summary,) = world.output.summaries
    versions = world.store.records()
    assert versions[-1].state == "live"
    assert versions[-2].state == "burnt"
    assert versions[-1].step == versions[-2].step == 6
    assert summary["eval_after"]["version"] == versions[-1].version


def test_steps_that_are_not_finite_are_skipped_and_too_many_end_the_run() -> None:
    async def spoil(world: World) -> None:
        world.backend._bad_gradients = frozenset({3, 7})
        world.backend._bad_steps = frozenset({8})

    world, _ = simulate(5, num_steps=10, meanwhile=spoil)
    assert [line["applied"] for line in world.output.lines].count(False) == 3
    assert world.output.summaries[0]["status"] == "finished"
    assert world.ledger.reasons()["non_finite"] == 12

    async def ruin(world: World) -> None:
        world.backend._bad_gradients = frozenset(range(3, 99))

    world, _ = simulate(5, num_steps=10, meanwhile=ruin)
    (summary,) = world.output.summaries
    assert summary["status"] == "failed"
    assert "3 steps in a row were not finite" in summary["reason"]
    assert len([v for v in world.store.records() if v.state == "live"]) == 3


DIGESTS = """
import hashlib, re, sys
from tests.simulation.draw import draw
from tests.simulation.simulate import run

for seed in map(int, sys.argv[1:]):
    outcome = run(draw(seed))
    events = sorted(outcome.logs.items())
    text = re.sub("0x[0-9a-f]+", "", repr((outcome.trace, events, outcome.problems)))
    print(seed, len(outcome.trace), hashlib.sha256(text.encode()).hexdigest())
"""


def test_a_seed_means_the_same_in_every_interpreter() -> None:
    """Hashes and addresses differ between the two, and the worlds come in another order."""
    seeds = ["5002", "5009", "5028"]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", DIGESTS, *order],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed, order in (("1", seeds), ("2", seeds[::-1]))
    ]
    first, second = ((each.communicate()[0] or "").splitlines() for each in running)
    assert [each.returncode for each in running] == [0, 0]
    assert len(first) == len(seeds)
    assert first == second[::-1]
