"""Faults of generation and of the numbers that come of it: seeds, rewards, steps."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.simulation.mutants.base import Patches, mutant

from ratchet.actors.generation import Generator, GroupFailure
from ratchet.actors.optimisation import Optimisation
from ratchet.backends.rollout.fake import FakeEngine
from ratchet.errors import RewardFailed
from ratchet.types import Packed


@mutant("a step that is not finite is published (prime-rl#2084)", seed=3)
def non_finite_step_published() -> Patches:
    optimise = Optimisation._optimise

    async def publish(self: Any, groups: Any, times: Any) -> Any:
        applied, reports = await optimise(self, groups, times)
        if not applied:
            self.num_steps += 1
            async with self._publisher.changing():
                await self._publisher.reserve(self.num_steps)
        return True, reports

    return [(Optimisation, "_optimise", publish)]


@mutant("the same seed for different samples of a group (ms-swift#7858)", seed=2)
def one_seed_for_a_group() -> Patches:
    complete = Generator._complete

    async def same(self: Any, prompt: Any, seeds: Any, *rest: Any) -> Any:
        return await complete(self, prompt, [seeds[0]] * len(seeds), *rest)

    generate = Generator._generate_group

    async def group(self: Any, *args: Any) -> Any:
        made = await generate(self, *args)
        seed = made.rollouts[0].seed
        rollouts = tuple(msgspec.structs.replace(r, seed=seed) for r in made.rollouts)
        return msgspec.structs.replace(made, rollouts=rollouts)

    return [(Generator, "_complete", same), (Generator, "_generate_group", group)]


@mutant("failures are trained as zero reward (NeMo-RL#3470)", seed=44)
def failure_is_zero() -> Patches:
    score = Generator._score

    async def zero(self: Any, prompt: Any, completions: Any) -> Any:
        try:
            return await score(self, prompt, completions)
        except RewardFailed:
            return [0.0] * len(completions)

    return [(Generator, "_score", zero)]


@mutant("one failed generation or reward kills the worker (trl#7176)", seed=13)
def failure_kills_the_worker() -> Patches:
    run_group = Generator.run_group

    async def fragile(self: Any, *args: Any) -> Any:
        outcome = await run_group(self, *args)
        if not isinstance(outcome, GroupFailure):
            return outcome
        raise RuntimeError(outcome.detail)

    return [(Generator, "run_group", fragile)]


@mutant("tokens go through text and back (trl#5224)", seed=2, fake=True)
def tokens_through_text() -> Patches:
    generate = FakeEngine.generate

    async def encoded_again(self: Any, prompt_ids: Any, params: Any) -> Any:
        completion = await generate(self, prompt_ids, params)
        text = self.decode(completion.token_ids.numpy().tolist())
        ids = text.encode("ascii", "replace")
        return completion._replace(token_ids=Packed.of(tuple(ids), "int32"))

    return [(FakeEngine, "generate", encoded_again)]
