"""What must hold of evaluations: a result is of one version, whatever happened beside it.

Consumes what the trainers wrote and the weights that were sent; produces what is wrong. The result
is computed again, from nothing but the weights of the version that it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any

import pytest

from ratchet.actors.generation import sample_seed
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
    from tests.simulation.world import reward

    weights: Any = world.wire.sent[version]
    tokens = [
        fake_token(weights, list(text.encode("latin-1")), seed, position)[0]
        for position in range(world.config.rollout.max_tokens)
    ]
    return reward(bytes(tokens).decode("latin-1"))
