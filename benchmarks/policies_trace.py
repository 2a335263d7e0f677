"""A recorded trace of generation, and an engine that replays it, for the benchmark of policies.

The trace says how long each sample of each attempt of each group is, and whether it is right;
nothing else of a policy changes what is generated. A token stands for a stretch of a real one.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from tests.helpers.scoring import SingleTurn

from ratchet.actors.trajectory import sample_seed
from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.backends.rollout.fake import FakeEngine
from ratchet.types import Packed, Prompt, VersionSpan

GROUP_SIZE: Final = 4
MEAN_TOKENS: Final = 64
MOST_TOKENS: Final = 16 * MEAN_TOKENS
TOKEN_S: Final = 0.625
"""of a decoding step, however many samples take part; so a mean sample takes 40 s"""
MEAN_S: Final = MEAN_TOKENS * TOKEN_S
MOST_S: Final = MOST_TOKENS * TOKEN_S
_ATTEMPTS: Final = 2
_OF_THE_PROMPT: Final = 0.5
"""share of the variance of the log length that a prompt's samples have in common"""


class Sample(NamedTuple):
    """What the policy makes of one seed."""

    group_id: int
    attempt: int
    num_tokens: int
    is_right: bool


class Ran(NamedTuple):
    """A sample that has left the engine."""

    sample: Sample
    began: float
    ended: float


class Trace:
    """Lengths are lognormal with a given sigma and about the same mean, cut off at 16 means, as a
    context is; long answers are less often right.
    """

    def __init__(self, sigma: float, num_groups: int, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        of_prompt = generator.standard_normal((num_groups, 1, 1))
        own = generator.standard_normal((num_groups, _ATTEMPTS, GROUP_SIZE))
        draw = np.sqrt(_OF_THE_PROMPT) * of_prompt + np.sqrt(1 - _OF_THE_PROMPT) * own
        lengths = MEAN_TOKENS * np.exp(sigma * draw - sigma**2 / 2)
        self.lengths = np.clip(np.rint(lengths), 1, MOST_TOKENS).astype(int)
        """[groups, attempts, samples]"""
        self.rewards = generator.random(lengths.shape) < 1 / (1 + lengths / MEAN_TOKENS)
        self.by_seed = {
            sample_seed(0, group, attempt, index): Sample(
                group,
                attempt,
                int(self.lengths[group, attempt, index]),
                bool(self.rewards[group, attempt, index]),
            )
            for group, attempt, index in np.ndindex(self.lengths.shape)
        }


class TraceEngine(FakeEngine):
    """Makes of each seed what the trace says, a token each `TOKEN_S`, over changes of weights."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self._trace = trace
        self._versions: list[int] = []
        self._since: list[float] = []
        self.ran: list[Ran] = []
        self.running: dict[asyncio.Task[object] | None, float] = {}
        """since when"""

    async def stamp(self, version: int) -> None:
        self._versions.append(version)
        self._since.append(asyncio.get_running_loop().time())
        await super().stamp(version)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        sample = self._trace.by_seed[params.seed]
        task, began = asyncio.current_task(), asyncio.get_running_loop().time()
        self.running[task] = began
        try:
            await asyncio.sleep(sample.num_tokens * TOKEN_S)
        finally:
            del self.running[task]
            self.ran.append(Ran(sample, began, asyncio.get_running_loop().time()))
        right = "\1" if sample.is_right else "\0"
        return Completion(
            Packed.of([ord(right)] * sample.num_tokens, "int32"),
            Packed.of([-1.0] * sample.num_tokens, "float32"),
            tuple(self._spans(began, sample.num_tokens)),
            "stop",
        )

    def _spans(self, began: float, num_tokens: int) -> list[VersionSpan]:
        first = bisect_right(self._since, began) - 1
        later = self._since[first + 1 :]
        starts = [0, *(min(num_tokens, int((since - began) / TOKEN_S)) for since in later)]
        ends = [*starts[1:], num_tokens]
        return [
            VersionSpan(version, start, end)
            for version, start, end in zip(self._versions[first:], starts, ends, strict=True)
            if start < end
        ]


class TraceScorer(SingleTurn):
    """Reads from a completion whether it is right."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        del prompt
        return [float(ord(completion[0])) for completion in completions]

    def close(self) -> None:
        pass
