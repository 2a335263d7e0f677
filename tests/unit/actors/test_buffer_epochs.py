"""N prompts against batches of B, on the buffer actor and its ledger as they are."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from tests.helpers.buffer_world import World, failed, scenario

from ratchet.messages import StepTrained
from ratchet.tasks.mixture import label_of
from ratchet.types import Assignment, Prompt

NUM_EPOCHS = 3
CREDIT = 1000
MIXTURE = {"name": "mixture", "args": {}}


async def train(world: World, num_steps: int, *, fail_every: int) -> list[tuple[int, str]]:
    """Finish whatever is in flight, the newest first, and train it; return each trained (epoch,
    prompt id). Every so many first attempts fail, and are issued again.
    """
    trained: list[tuple[int, str]] = []
    of_group: dict[int, Assignment] = {}
    num_seen = 0
    await world.claim(CREDIT)
    for step in range(1, num_steps + 1):
        await world.request(step=step - 1)
        while len(world.batches) < step:
            seen, num_seen = world.assignments[num_seen:], len(world.assignments)
            assert seen, "the trainer waits, and nothing is in flight"
            for assignment in reversed(seen):
                of_group[assignment.group_id] = assignment
                if assignment.attempt == 0 and fail_every and assignment.group_id % fail_every == 0:
                    await world.tell(failed(assignment))
                else:
                    await world.finish(assignment)
        (groups,) = (ready.batch.groups for ready in world.batches[step - 1 :])
        ids = tuple(group.group_id for group in groups)
        trained += [(of_group[i].epoch, of_group[i].prompt.prompt_id) for i in ids]
        assert len(ids) == world.config.buffer.batch_groups
        await world.tell(StepTrained(1, step, ids, {}))
    return trained


@pytest.mark.parametrize("fail_every", [0, 3])
@pytest.mark.parametrize("batch_groups", range(1, 6))
@pytest.mark.parametrize("num_prompts", range(1, 8))
def test_every_prompt_is_trained_once_an_epoch(
    num_prompts: int, batch_groups: int, fail_every: int
) -> None:
    async def body(world: World) -> None:
        in_flight = (
            world.config.buffer.capacity + 1
        )  # what may be left of an epoch when the run ends
        num_steps = math.ceil((NUM_EPOCHS * num_prompts + in_flight) / batch_groups)
        trained = await train(world, num_steps, fail_every=fail_every)
        assert max(Counter(trained).values()) == 1
        expected = {(e, f"p{i}") for e in range(NUM_EPOCHS) for i in range(num_prompts)}
        assert expected <= set(trained)
        assert world.ledger.counts()["trained"] == num_steps * batch_groups

    buffer = {"batch_groups": batch_groups, "unused": "retry", "max_staleness": 1000}
    scenario(body, num_prompts=num_prompts, buffer=buffer)


def test_the_tasks_of_a_mixture_share_the_batches_by_weight() -> None:
    sizes = {"a": 2, "b": 5}
    parts = [{"name": "copy", "label": "a", "weight": 3}, {"name": "copy", "label": "b"}]
    prompts = [Prompt(f"{label}/{i}", "1>") for label, size in sizes.items() for i in range(size)]

    async def body(world: World) -> None:
        num_steps, batch_groups = 16, 3
        trained = await train(world, num_steps, fail_every=0)
        assert max(Counter(trained).values()) == 1
        issued = Counter(label_of(each.prompt.prompt_id) for each in world.assignments)
        assert abs(issued["a"] - 3 * issued["b"]) <= 3
        num_in_flight = world.config.buffer.capacity
        assert issued.total() == num_steps * batch_groups + num_in_flight
        for label, size in sizes.items():
            num_whole = (issued[label] - num_in_flight) // size
            expected = {(e, f"{label}/{i}") for e in range(num_whole) for i in range(size)}
            assert expected <= set(trained)

    buffer = {"batch_groups": 3, "max_staleness": 1000}
    scenario(body, prompts=prompts, buffer=buffer, task=MIXTURE | {"tasks": parts})
