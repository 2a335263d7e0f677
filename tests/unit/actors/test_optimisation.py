"""What a trainer steps on, and what it does where there is nothing to step on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from tests.helpers.trainer_world import BATCH_TIMEOUT_S, World, account, mixed_group, scenario

from ratchet.messages import StepTrained
from ratchet.types import Batch, RolloutGroup

# --- staleness, batches


def test_stale_groups_are_sent_back_and_never_trained() -> None:
    async def body(world: World) -> None:
        for number in (1, 2):
            await world.answer(number, number - 1)
        await world.answer(3, 0, 2, 1)  # staleness 2, 0 and 1; the bound is 1
        await world.end()
        assert world.of("forward")[2][1:] == (31, 32)
        assert world.buffer.of(StepTrained)[2] == account(3, (31, 32), {30: "stale"})
        assert world.lines[2]["num_groups"] == 2

    scenario(body, trainer={"num_steps": 3}, buffer={"batch_groups": 4, "max_staleness": 1})


def test_a_batch_all_stale_takes_no_step_and_another_is_asked_for() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.answer(2, 0)
        await world.until_request(3)
        assert world.requests == [(0, 0), (1, 1), (1, 1)]
        assert world.buffer.of(StepTrained)[1] == account(2, (), {20: "stale"})
        assert len(world.lines) == len(world.of("forward")) == 1
        assert world.ref.is_alive()

    scenario(body, buffer={"batch_groups": 4, "max_staleness": 0})


async def answer_mixed(world: World, number: int, *groups: tuple[int, ...]) -> None:
    """Answer the `number`th request with groups that have a version per rollout."""
    await world.until_request(number)
    ready = world.batch(world.requests[-1][1] + 1, *(0 for _ in groups), first=10 * number)
    mixed = [
        mixed_group(group, versions, group.group_id)
        for group, versions in zip(ready.batch.groups, groups, strict=True)
    ]
    world.ref.tell(msgspec.structs.replace(ready, batch=Batch(ready.batch.step, tuple(mixed))))


def test_with_mask_what_is_stale_is_masked_by_the_weights_that_take_the_step() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await answer_mixed(world, 2, (0, 1), (0, 0), (1, 1))  # the bound is 0, the weights are 1
        await world.end()
        assert world.of("forward")[1][1:] == (20, 22)
        assert world.backend.trained[1] == [[0, 1], [1, 1]]
        assert world.buffer.of(StepTrained)[1] == account(2, (20, 22), {21: "stale"})
        line = world.lines[1]
        assert (line["num_groups"], line["buffer/staleness_max"]) == (2, 0)
        assert (line["buffer/masked_groups"], world.lines[0]["buffer/masked_groups"]) == (1, 0)
        assert line["buffer/masked_tokens"] > 0

    scenario(body, buffer={"batch_groups": 4, "max_staleness": 0, "unused": "mask"})


class Marks:
    """A batch filter by script: what `marks` of the calls so far says."""

    def __init__(self, marks: Callable[[int, Sequence[RolloutGroup]], Any]) -> None:
        self._marks = marks
        self.seen: list[list[int]] = []
        self.closed = 0

    async def marks(self, groups: Sequence[RolloutGroup]) -> Any:
        self.seen.append([group.group_id for group in groups])
        found = self._marks(len(self.seen), groups)
        return await found if isinstance(found, Awaitable) else found

    def close(self) -> None:
        self.closed += 1


def test_what_the_batch_filter_marks_is_not_trained_and_the_batch_keeps_its_shape() -> None:
    def half(call: int, groups: Sequence[RolloutGroup]) -> Any:
        return [[True, False]] + [[True, True]] * (len(groups) - 1)

    batch_filter = Marks(half)

    async def body(world: World) -> None:
        await world.answer(1, 0, 0)
        await world.answer(2, 0, 0, 1)  # the first two are stale, and are not shown
        await world.end()
        assert batch_filter.seen == [[10, 11], [22]]
        assert world.of("forward")[0][1:] == (10, 11)
        assert world.backend.trained == [[[0, 1], [0, 0]], [[0, 1]]]
        first, second = world.buffer.of(StepTrained)
        assert first == account(1, (10,), {11: "filter:batch"})
        assert second == account(2, (22,), {20: "stale", 21: "stale"})
        assert [line["buffer/marked_samples"] for line in world.lines] == [3, 1]
        assert [line["num_groups"] for line in world.lines] == [1, 1]
        assert batch_filter.closed == 1

    buffer = {"batch_groups": 4, "max_staleness": 0}
    scenario(body, batch_filter=batch_filter, buffer=buffer)


def test_a_batch_with_nothing_left_is_a_step_skipped_counted_and_not_published() -> None:
    def first_all(call: int, groups: Sequence[RolloutGroup]) -> Any:
        return [[call == 1] * 2 for _ in groups]

    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.answer(2, 0)
        await world.until_request(3)
        assert world.order("forward", "skip", "optimizer") == ["forward", "optimizer"]
        assert [e[1:] for e in world.of("reserve")] == [(0,), (1,)]
        assert world.requests == [(0, 0), (0, 0), (1, 1)]
        assert world.buffer.of(StepTrained)[0] == account(1, (), {10: "filter:batch"})
        line = world.lines[0]
        assert (line["applied"], line["num_groups"], line["reward_mean"]) == (False, 0, None)
        (event,) = world.log.named("step_skipped")
        assert (event["reason"], event["groups"]) == ("nothing_to_train", [10])

    scenario(body, batch_filter=Marks(first_all))


def test_a_batch_filter_that_leaves_nothing_ends_the_run_in_the_end() -> None:
    async def body(world: World) -> None:
        for number in (1, 2, 3):
            await world.answer(number, 0)
        await world.end()
        assert world.summaries[0]["reason"] == (
            "3 steps in a row had no token to train (buffer.batch_filter = 'my.code:f');"
            " last groups: [30]"
        )

    marks = Marks(lambda call, groups: [[True] * 2 for _ in groups])
    scenario(body, batch_filter=marks, buffer={"batch_groups": 4, "batch_filter": "my.code:f"})


def test_a_batch_filter_that_does_not_answer_ends_the_run() -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.end(BATCH_TIMEOUT_S + 20)
        assert world.summaries[0]["reason"] == (
            "trainer-0 waited 100.0 s (trainer.batch_timeout_s) on buffer.batch_filter for the"
            " marks of step 1"
        )
        assert world.of("forward") == []

    never = Marks(lambda call, groups: asyncio.get_running_loop().create_future())
    scenario(body, batch_filter=never)


# --- not finite


@pytest.mark.parametrize(
    ("script", "second_half"), [({"bad_gradients": [1]}, "skip"), ({"bad_steps": [1]}, "optimizer")]
)
def test_a_step_that_is_not_finite_is_skipped_counted_and_not_published(
    script: Any, second_half: str
) -> None:
    async def body(world: World) -> None:
        await world.answer(1, 0)
        await world.until_request(2)
        assert world.order("forward", "skip", "optimizer") == ["forward", second_half]
        assert [e[1:] for e in world.of("reserve")] == [(0,)]
        assert world.buffer.of(StepTrained) == [account(1, (), {10: "non_finite"})]
        assert world.requests == [(0, 0), (0, 0)]
        (line,) = world.lines
        assert (line["step"], line["applied"]) == (1, False)
        assert world.log.named("step_skipped")[0]["groups"] == [10]

    scenario(body, script=script)


def test_bad_steps_in_a_row_end_the_run_and_one_good_step_forgives() -> None:
    async def body(world: World) -> None:
        for number in range(1, 6):
            await world.answer(number, 0)
        await world.end()
        (summary,) = world.summaries
        assert summary["status"] == "failed"
        assert summary["steps"] == 1
        assert summary["reason"] == "3 steps in a row were not finite; last groups: [50]"
        assert world.models == 0
        assert len(world.of("commit")) == 2  # version 0 and the good step's

    script = {"bad_gradients": [1, 3, 4, 5]}
    scenario(body, script=script, trainer={"num_steps": 9, "max_bad_steps": 3})
