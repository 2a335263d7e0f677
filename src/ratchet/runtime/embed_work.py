"""A prompt that a producer of the user's own has claimed, and the group that it makes of it.

Consumes what the user's code has sampled, produces a `RolloutGroup`; waits for nothing. What cannot
be trained is refused here, where it was made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ratchet.types import (
    Assignment,
    FinishReason,
    Packed,
    PolicyVersion,
    Prompt,
    Rollout,
    RolloutGroup,
    VersionSpan,
)

Spans: TypeAlias = Sequence[VersionSpan]
Samples: TypeAlias = Rollout | Sequence[Rollout]
"""One trajectory: one rollout, or several where its context was cut down between two turns, or
where several agents take part. They share its reward."""

_DTYPES: Final = ("int32", "int32", "float32", "uint8")


@dataclass(frozen=True)
class Work:
    """A prompt to be answered `group_size` times, until the lease ends."""

    assignment: Assignment
    prompt_ids: tuple[int, ...]
    """the prompt as the policy sees it"""

    @property
    def prompt(self) -> Prompt:
        """The problem."""
        return self.assignment.prompt

    @property
    def group_size(self) -> int:
        """Trajectories that make a group."""
        return self.assignment.group_size

    @property
    def lease_s(self) -> float:
        """Seconds from the claim after which the prompt is another's."""
        return self.assignment.lease_s

    def rollout(
        self,
        completion_ids: Sequence[int],
        logprobs: Sequence[float],
        *,
        reward: float,
        version: PolicyVersion | Spans,
        finish_reason: FinishReason = "stop",
        loss_mask: Sequence[int] | None = None,
        seed: int = 0,
        prompt_ids: Sequence[int] | None = None,
    ) -> Rollout:
        """Make a rollout of one completion, or of turns with the environment's tokens in between.

        Args:
            completion_ids: C token ids of the policy's tokenizer, the end of sequence included.
            logprobs: C natural logs of the probability in the very distribution sampled from; 0
                for a token of the environment.
            reward: a finite number, of the whole trajectory.
            version: whose weights made the tokens; spans where they changed on the way. A token of
                the environment has the version of the sampled one before it.
            finish_reason: "stop", or "length" where it was cut off.
            loss_mask: 1 where a token is trained, 0 for those of the environment; all 1 by default.
            seed: that would make it again, if there is one.
            prompt_ids: what this sample continues; by default the prompt.
        """
        num = len(completion_ids)
        mask = loss_mask if loss_mask is not None else [1] * num
        spans = (VersionSpan(version, 0, num),) if isinstance(version, int) else tuple(version)
        return Rollout(
            prompt_ids=Packed.of(self.prompt_ids if prompt_ids is None else prompt_ids, "int32"),
            completion_ids=Packed.of(completion_ids, "int32"),
            behavior_logprobs=Packed.of(logprobs, "float32"),
            loss_mask=Packed.of(mask, "uint8"),
            spans=spans,
            finish_reason=finish_reason,
            reward=float(reward),
            seed=seed,
        )

    def group(self, trajectories: Sequence[Samples], vocabulary: int) -> RolloutGroup:
        """Put the trajectories together.

        Raises:
            ValueError: if they are not `group_size`, or one of them cannot be trained.
        """
        if len(trajectories) != self.group_size:
            msg = (
                f"a group has {self.group_size} trajectories (rollout.group_size), not"
                f" {len(trajectories)}"
            )
            raise ValueError(msg)
        rollouts: list[Rollout] = []
        for number, samples in enumerate(trajectories):
            whole = (samples,) if isinstance(samples, Rollout) else tuple(samples)
            problem = what_is_wrong(whole, vocabulary)
            if problem is not None:
                msg = f"rollout {number} of prompt {self.prompt.prompt_id!r}: {problem}"
                raise ValueError(msg)
            trajectory = None if isinstance(samples, Rollout) else number
            rollouts += [replace(sample, trajectory=trajectory) for sample in whole]
        assignment = self.assignment
        return RolloutGroup(
            assignment.group_id,
            assignment.attempt,
            self.prompt.prompt_id,
            assignment.epoch,
            tuple(rollouts),
        )


def what_is_wrong(samples: Sequence[Rollout], vocabulary: int) -> str | None:
    """Return why a trajectory cannot be trained; None if it can."""
    if len({sample.reward for sample in samples}) != 1:
        rewards = [sample.reward for sample in samples]
        return f"its samples have rewards {rewards}: each carries the one of the whole trajectory"
    problems = (_what_is_wrong(sample, vocabulary) for sample in samples)
    return next((problem for problem in problems if problem is not None), None)


def _what_is_wrong(rollout: Rollout, vocabulary: int) -> str | None:
    arrays = (
        rollout.prompt_ids,
        rollout.completion_ids,
        rollout.behavior_logprobs,
        rollout.loss_mask,
    )
    num = len(rollout.completion_ids)
    if tuple(array.dtype for array in arrays) != _DTYPES or not len(rollout.prompt_ids):
        return f"it takes a prompt, and arrays of {', '.join(_DTYPES)}"
    lengths = (num, len(rollout.behavior_logprobs), len(rollout.loss_mask))
    if not num or lengths != (num,) * 3:
        return f"{lengths} token ids, logprobs and mask values; it takes as many of each, 1 or more"
    if not math.isfinite(rollout.reward):
        return f"reward = {rollout.reward} is not a finite number"
    logprobs: npt.NDArray[np.float32] = rollout.behavior_logprobs.numpy()
    if not np.isfinite(logprobs).all() or (logprobs > 0).any():
        return "a logprob is not finite, or above 0: they are natural logs of probabilities"
    ids = np.concatenate([array.numpy() for array in arrays[:2]])
    if ids.min() < 0 or ids.max() >= vocabulary:
        return f"a token id is outside of the policy's vocabulary, 0 to {vocabulary - 1}"
    ends = [0, *(span.end for span in rollout.spans)]
    starts = [*(span.start for span in rollout.spans), num]
    if ends != starts or any(span.start >= span.end for span in rollout.spans):
        return f"its version spans {rollout.spans} do not cover its {num} tokens in order"
    return None
