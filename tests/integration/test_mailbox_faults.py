"""Real processes that are killed, stopped and cut off while numbered messages flow between them.

What the processes did is in files of their own, which a kill does not take with it; the verdict is
made of these afterwards. See `tests/helpers/mailbox_fault_process.py` for who writes what.
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import pytest
from tests.helpers.mailbox_fault_stage import Stage, events, play, stage
from tests.helpers.mailbox_fault_verdict import judge

from ratchet.transport.mailbox.frames import PROTOCOL

TOLD_S = 1.0
NUM_KILLS = 22
NUM_MESSAGES = 20_000


@pytest.mark.slow
@pytest.mark.timeout(250)  # 20 s on an idle machine
def test_kills_stops_and_cuts_lose_double_and_reorder_nothing(tmp_path: Path) -> None:
    """Four processes, each sends to two and hears from two; two links are direct, two relayed."""
    rng = random.Random(0)
    names = ("s1", "s2", "r1", "r2")
    relayed = [("s1", "r2"), ("s2", "r1")]

    async def trouble(here: Stage) -> None:
        """Something that is not a death; some of it looks like one."""
        link = rng.choice(relayed)
        both = [here.relays[link], here.relays[link[::-1]]]
        match rng.randrange(5):
            case 0:
                for relay in both:
                    relay.cut()
            case 1:
                with both[0].held_up(rng.choice(("there", "back"))):
                    await asyncio.sleep(0.2)
            case 2:  # looks like the end of both
                for relay in both:
                    relay.refuse()
                    relay.cut()
                await asyncio.sleep(0.1)
                for relay in both:
                    await relay.admit()
            case 3 | 4:
                await here.pause(rng.choice(sorted(here.living)), rng.uniform(0.05, 0.6))

    async def scene() -> None:
        async with stage(tmp_path) as here:
            for one, other in relayed:
                await here.relay(one, other)
                await here.relay(other, one)
            others = {"s": ("r1", "r2"), "r": ("s1", "s2")}
            for name in names:
                await here.start(name, *others[name[0]], per_turn=5)
            for process in here.living.values():
                process.order("flow")
            for turn in range(NUM_KILLS):
                await here.all_watch()
                await trouble(here)
                await here.all_watch()
                name = names[turn % 4] if turn < 8 else rng.choice(names)
                orders = here.living[name].orders
                await here.kill(name)
                await here.restart(name, orders)
            verdict = await here.finish()
            print(verdict, "told within", max(here.told_s))  # noqa: T201 - for pytest -s
            assert not verdict.problems
            assert verdict.given >= NUM_MESSAGES
            assert len(here.killed) == NUM_KILLS
            assert len(here.told_s) == 2 * NUM_KILLS
            assert max(here.told_s) < TOLD_S

    play(scene)


@pytest.mark.soak
def test_a_process_stopped_for_20_s_is_suspected_then_dead_then_back(tmp_path: Path) -> None:
    """At the default times: suspected after 5 s, dead after 15 s."""
    limits = {"suspect_s": 5.0, "dead_s": 15.0}

    async def scene() -> None:
        async with stage(tmp_path) as here:
            one = await here.start("one", "two", limits=limits, per_turn=1, turn_s=0.02)
            two = await here.start("two", "one", limits=limits, per_turn=1, turn_s=0.02)
            await here.all_watch()
            for process in (one, two):
                process.order("flow")
            begin = time.monotonic()
            stopped = asyncio.create_task(here.pause("two", 20.0))
            _, _, at = await one.says("peer_silent", "two")
            assert 4.0 < float(at) - begin < 7.5
            _, _, at, *reason = await one.says("down", "two")
            assert 14.0 < float(at) - begin < 17.5
            assert reason == ["two", "was", "silent", "for", "15", "s"]
            await stopped
            await here.all_watch()
            assert len(events(one, "down")) == 1
            assert not events(two, "peer_silent")  # it was not the other that stood still
            verdict = await here.finish()
            assert not verdict.problems
            assert verdict.given > 500

    play(scene)


def test_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as here:
            await here.relay("one", "two")
            await here.relay("two", "one")
            one = await here.start("one", "two", jumps=True)
            two = await here.start("two", "one", jumps=True)
            await here.all_watch()
            for process in (one, two):
                process.order("flow")
            await here.pause("two", 0.5)
            for relay in here.relays.values():
                relay.cut()
            await here.all_watch()
            await asyncio.sleep(0.5)
            assert not events(one, "down", "peer_silent")
            assert not events(two, "down", "peer_silent")
            await here.kill("two")
            await here.restart("two", two.orders)
            verdict = await here.finish()
            assert not verdict.problems
            assert verdict.heard > 200
            assert max(here.told_s) < TOLD_S

    play(scene)


def test_a_wrong_key_fails_the_asks_of_both_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as here:
            one = await here.start("one")
            two = await here.start("two", key=bytes(range(1, 33)).hex())
            for process, other in ((one, "two"), (two, "one")):
                process.order("ask", other)
                said = await process.says("failed")
                assert said[1] == "AuthFailed"
                assert "do not hold the same key" in " ".join(said)

    play(scene)


def test_a_wrong_protocol_version_names_both_on_both_ends(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as here:
            one = await here.start("one")
            two = await here.start("two", protocol=7)
            one.order("ask", "two")
            said = " ".join(await one.says("failed"))
            assert "AuthFailed" in said
            two.order("quit")
            await two.end()
            assert b"auth_failed" in two.stderr
            for text in (said, two.stderr.decode()):
                assert f"link protocol {PROTOCOL}" in text
                assert "speaks 7" in text

    play(scene)


def test_the_verdict_finds_planted_faults(tmp_path: Path) -> None:
    planted = {
        "double": "doubled: ",
        "lose": "lost without a word: ",
        "shuffle": "out of order: ",
        "boast": "acknowledged and lost: ",
    }

    async def scene() -> None:
        async with stage(tmp_path) as here:
            await asyncio.gather(*(here.start(fault, fault=fault) for fault in planted))
            one = await here.start("one", *planted, per_turn=20)
            one.order("flow")
            await asyncio.sleep(1.0)
            problems = judge(tmp_path, set()).problems
            for fault, found in planted.items():
                assert any(each.startswith(f"{found}('one', 1, {fault!r}") for each in problems)

    play(scene)


def test_a_death_that_is_told_late_is_found(tmp_path: Path) -> None:
    async def scene() -> None:
        async with stage(tmp_path) as here:
            await here.start("two")
            await here.start("one", "two", fault="dawdle")
            await here.all_watch()
            await here.kill("two")
            assert max(here.told_s) > TOLD_S

    play(scene)
