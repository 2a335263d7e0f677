"""Every token is that of the version in its stamp: computed again from the weights that were sent.

Consumes a world and what was trained in it, shares no code with what made the tokens but for the
model. Waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.fakes import reward, turns_of

from ratchet.actors.trajectory import turn_seed
from ratchet.backends.rollout.fake import fake_token
from ratchet.types import RolloutGroup

if TYPE_CHECKING:
    from tests.simulation.world import World


def check_trained_tokens(world: World) -> int:
    """Compute every token of every batch again; return how many there are."""
    return sum(check_group(world, group) for each in world.batches for group in each.batch.groups)


def check_group(world: World, group: RolloutGroup) -> int:
    """Compute every token of a group again; return how many there are."""
    count = 0
    assert len({rollout.seed for rollout in group.rollouts}) == len(group.rollouts), group
    for rollout in group.rollouts:
        text = bytes(rollout.completion_ids.numpy().tolist()).decode("latin-1")
        assert rollout.reward == reward(text), (group.group_id, rollout.reward)
        prompt = rollout.prompt_ids.numpy().tolist()
        tokens = rollout.completion_ids.numpy().tolist()
        turns = turns_of(rollout)
        for span in rollout.spans:
            weights = world.wire.sent[span.version]
            for position in range(span.start, span.end):
                turn, start = turns[position]
                if turn is None:
                    continue  # what the environment said
                context, seed = prompt + tokens[:start], turn_seed(rollout.seed, turn)
                expected, _ = fake_token(weights, context, seed, position - start)
                assert tokens[position] == expected, (group.group_id, span)
                count += 1
    return count
