from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import pytest
from tests.helpers.trainer_world import (
    BATCH_TIMEOUT_S,
    E1,
    FORWARD_S,
    SEND_S,
    World,
    account,
    fails,
    scenario,
)

from ratchet.messages import RoleJoined, StepTrained, StopTraining

# --- a whole run


def test_a_run_from_the_base_model_to_the_last_version() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0, 0)
        await world.answer(2, 0, 1)
        await world.end()
        assert world.requests == [(0, 0), (1, 1)]
        assert [e[1:] for e in world.of("commit")] == [(0,), (1,), (2,)]
        assert [r.parent for r in world.records] == [None, 0, 1]
        assert [r.step for r in world.records] == [0, 1, 2]
        trained = world.buffer.of(StepTrained)
        assert trained == [account(1, (10, 11), {}), account(2, (20, 21), {})]
        assert [(line["step"], line["version"]) for line in world.lines] == [(1, 0), (2, 1)]
        assert world.models == 1
        assert world.summaries == [
            {
                "status": "finished",
                "reason": None,
                "steps": 2,
                "eval_before": {
                    "version": 0, "accuracy": 0.5, "num_prompts": 3, "num_failed": 0,
                },
                "eval_after": {
                    "version": 2, "accuracy": 0.5, "num_prompts": 3, "num_failed": 0,
                },
            }
        ]  # fmt: skip
        assert world.order("closed") == ["closed"]

    scenario(body, eval={"num_prompts": 3})


def test_warm_start_comes_before_version_0() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        assert world.order("warm_start", "reserve", "send", "commit") == [
            "warm_start", "reserve", "send", "commit",
        ]  # fmt: skip

    scenario(body, warm_start={"steps": 1})


# --- order of events


def test_the_number_is_reserved_before_the_batch_is_asked_for() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.until_request(2)
        assert world.requests[1] == (1, 1)
        assert world.of("commit")[-1][1] == 0  # asked for while version 1 still travels
        assert world.of("reserve")[-1][1] == 1

    scenario(body)


def test_forward_overlaps_with_the_transfer_and_the_optimizer_waits_for_it() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.answer(2, 0)
        await world.end()
        (_, sent_at, _) = (when for when, _ in world.of("sent"))
        (_, send_at, _) = (when for when, _ in world.of("send"))
        (_, forward_at) = (event[0] for event in world.of("forward"))
        (_, optimizer_at) = (event[0] for event in world.of("optimizer"))
        assert send_at <= forward_at < forward_at + FORWARD_S < sent_at
        assert optimizer_at == sent_at
        assert world.order("send", "sent") == ["send", "sent"] * 3  # never two in flight

    scenario(body)


class Copies:
    """A snapshot that takes no time."""

    async def take(self, version: int) -> None:
        pass

    def reading(self, version: int) -> Any:
        return nullcontext()


def test_with_a_snapshot_the_optimizer_does_not_wait_for_the_transfer() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.answer(2, 0)
        await world.end()
        stepped_at = [event[0] for event in world.of("optimizer")]
        sent_at = [event[0] for event in world.of("sent")]
        assert stepped_at[1] < sent_at[1]
        assert world.order("send", "sent") == ["send", "sent"] * 3  # never two in flight
        assert [e[1:] for e in world.of("commit")] == [(0,), (1,), (2,)]
        assert world.summaries[0]["status"] == "finished"
        assert world.lines[1]["publish_s"] == 0.0

    scenario(body, snapshot=Copies())


def test_a_line_has_the_last_sync_and_who_caught_up() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        await world.tell(RoleJoined(E1))
        await asyncio.sleep(SEND_S + 1)
        await world.answer(1, 0)
        await world.answer(2, 1)
        await world.end()
        first, second = world.lines
        sync = {name: value for name, value in first.items() if name.startswith("weights/")}
        assert sync == {
            "weights/version": 0,
            "weights/sent_bytes": 8,
            "weights/num_buckets": 1,
            "weights/snapshot_s": 0.0,
            "weights/gather_s": 0.0,
            "weights/move_s": SEND_S,
            "weights/load_s": 0,
            "weights/paused_s": 0,
            "weights/num_loaded": 1,
            "weights/num_failed": 0,
            "weights/num_caught_up": 1,
        }
        assert first["sync_s"] == SEND_S
        assert (second["weights/version"], second["weights/num_caught_up"]) == (1, 0)

    scenario(body)


def test_the_synchronous_baseline_trains_on_nothing_while_it_publishes() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.until_request(2)
        assert world.order("sent", "commit") == ["sent", "commit"] * 2
        assert world.of("commit")[-1][1] == 1

    scenario(body, trainer={"synchronous": True})


# --- the end


def test_a_newer_trainer_ends_this_one() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        world.fenced = True
        await world.answer(1, 0)
        await world.end()
        assert world.summaries == []  # that is for the other one to write
        assert world.models == 0
        assert world.buffer.of(StepTrained) == []

    scenario(body)


def test_no_batch_in_time_ends_the_run_and_says_who_waited_on_whom() -> None:
    async def body(world: World) -> None:
        await world.until_request(1)
        (row,) = world.ref._system.waits.rows()
        assert (row.who, row.on, row.what) == ("trainer-0", "buffer", "the batch of step 1")
        assert row.until - row.since == BATCH_TIMEOUT_S
        await world.end()
        (summary,) = world.summaries
        assert summary == {
            "status": "failed",
            "reason": "trainer-0 waited 100.0 s (trainer.batch_timeout_s) on buffer for the batch"
            " of step 1",
            "steps": 0,
        }

    scenario(body)


def test_no_engine_in_time_ends_the_run() -> None:
    async def body(world: World) -> None:
        world.rollouts = ()
        await world.end(BATCH_TIMEOUT_S + 5)
        assert "on rollout for the first engine" in world.summaries[0]["reason"]

    scenario(body)


def test_no_engine_that_takes_the_weights_ends_the_run() -> None:
    async def body(world: World) -> None:
        world.engines["rollout-0"] = fails
        await world.end(BATCH_TIMEOUT_S + 5)
        (summary,) = world.summaries
        assert summary["status"] == "failed"
        assert "on rollout for an engine to hold the first version" in summary["reason"]

    scenario(body)


async def _at_the_first_engine(world: World) -> None:
    world.rollouts = ()
    await asyncio.sleep(1)


async def _at_the_first_version(world: World) -> None:
    world.engines["rollout-0"] = fails
    await asyncio.sleep(SEND_S + 0.5)


async def _at_a_batch(world: World) -> None:
    await world.until_request(1)


@pytest.mark.parametrize("reach", [_at_the_first_engine, _at_the_first_version, _at_a_batch])
def test_a_stop_ends_every_wait_and_the_model_is_written(
    reach: Callable[[World], Awaitable[None]],
) -> None:
    async def body(world: World) -> None:
        await reach(world)
        await world.tell(StopTraining("asked to stop"))
        await world.end(SEND_S * 2 + 2)
        (summary,) = world.summaries
        assert (summary["status"], summary["reason"]) == ("stopped", "asked to stop")
        assert summary["steps"] == 0
        assert world.models == 1

    scenario(body)


def test_a_stop_in_a_step_lets_it_finish_and_be_published() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await asyncio.sleep(FORWARD_S / 2)
        await world.tell(StopTraining("enough"))
        await world.end()
        (summary,) = world.summaries
        assert (summary["status"], summary["steps"]) == ("stopped", 1)
        assert [e[1:] for e in world.of("commit")] == [(0,), (1,)]
        assert len(world.requests) == 1

    scenario(body, trainer={"num_steps": 50})


# --- what it says of itself


def test_its_facts_are_the_step_in_hand_and_what_the_next_one_waits_for() -> None:
    async def body(world: World) -> None:
        actor = world.ref._status().__self__
        assert actor.status()["last_step_s"] is None
        await world.until_request(1)
        facts = actor.status()
        assert (facts["step"], facts["version"], facts["term"]) == (0, 0, 1)
        assert (facts["waits_for_batch"], facts["publishing"]) == (True, False)
        assert (facts["live"], facts["holders"], facts["engines"]) == (0, 1, 1)
        await world.answer(1, 0)
        await world.until_request(2)
        await asyncio.sleep(30.0)
        facts = actor.status()
        assert (facts["step"], facts["version"], facts["live"]) == (1, 1, 1)
        assert isinstance(facts["last_step_s"], float)
        assert 30.0 <= facts["last_step_s"] < 31.0

    scenario(body)
