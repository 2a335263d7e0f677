"""What must hold of evaluations: a result is of one version, whatever happened beside it.

Consumes what the trainers wrote and the weights that were sent; produces what is wrong. The result
is computed again, from nothing but the weights of the version that it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest
from tests.simulation.fakes import answer, reward
from tests.simulation.rollout_draws import stop_after

from ratchet.actors.trajectory import sample_seed, turn_seed
from ratchet.backends.rollout.base import SamplingParams
from ratchet.backends.rollout.fake import fake_token
from ratchet.types import PolicyVersion

if TYPE_CHECKING:
    from tests.simulation.world import World


def check(world: World) -> Iterator[str]:
    """Say what is wrong with the evaluations of all trainers of a world."""
    live = {record.version for record in world.store.records() if record.state == "live"}
    for trainer in world.trainers:
        for line in trainer.output.evaluations:
            version = line["version"]
            if version not in live:
                yield f"{line} is of a version that never was live"
            elif line["num_prompts"] + line["num_failed"] != world.config.eval.num_prompts:
                yield f"{line} does not count all prompts"
            elif (line["accuracy"] is None) != (line["num_prompts"] == 0):
                yield f"{line} has a result without a prompt, or none with one"
            elif not line["num_failed"] and line["accuracy"] != pytest.approx(
                _mean(world, version)
            ):
                yield f"{line} is not what version {version} reaches: {_mean(world, version)}"


def _mean(world: World, version: PolicyVersion) -> float:
    samples = range(world.config.eval.samples)
    prompts = world.eval_prompts[: world.config.eval.num_prompts]
    return fmean(
        fmean(_reward(world, version, each.text, _seed(world, each.prompt_id, i)) for i in samples)
        for each in prompts
    )


def _seed(world: World, prompt_id: str, sample: int) -> int:
    return sample_seed(world.config.seed, f"eval/{prompt_id}", 0, sample)


def _reward(world: World, version: PolicyVersion, text: str, seed: int) -> float:
    weights: Any = world.wire.sent[version]
    max_tokens = world.config.rollout.max_tokens
    prompt, said = list(text.encode("latin-1")), ""
    for turn in range(world.num_turns):
        params = SamplingParams(max_tokens, 0.0, turn_seed(seed, turn))
        ends = stop_after(world.num_turns)
        length = max_tokens if ends is None else min(max_tokens, ends(prompt, params))
        tokens = [
            fake_token(weights, prompt, params.seed, position)[0] for position in range(length)
        ]
        own = bytes(tokens).decode("latin-1")
        reply = answer(own)
        said += own
        if length == max_tokens or reply is None or turn + 1 == world.num_turns:
            break
        said += reply
        prompt += tokens + list(reply.encode("latin-1"))
    return reward(said)
