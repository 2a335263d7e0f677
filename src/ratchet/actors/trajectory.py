"""The tokens of one trajectory, as it grows turn by turn.

Pure: consumes completions of an engine and replies of an environment, produces a `Rollout`; waits
for nothing. What was sampled is kept as it was sampled, never decoded and encoded again: the prompt
of the next turn is exactly the tokens so far. P prompt tokens, C tokens behind them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from ratchet.backends.rollout.base import Completion
from ratchet.tasks.base import Conversation
from ratchet.types import FinishReason, Packed, PolicyVersion, Rollout, VersionSpan


def sample_seed(run_seed: int, group: int | str, attempt: int, sample: int) -> int:
    """Return the seed of one trajectory: another one for each run, group, attempt and sample."""
    return _hash(f"{run_seed}/{group}/{attempt}/{sample}")


def turn_seed(seed: int, turn: int) -> int:
    """Return the seed of a turn, from 0, of a trajectory; the first has the trajectory's own."""
    return seed if turn == 0 else _hash(f"{seed}/turn/{turn}")


def _hash(text: str) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Trajectory:
    """A prompt and what follows it so far.

    Args:
        prompt_ids: P at least 1.
        seed: of the trajectory.
    """

    def __init__(self, prompt_ids: Sequence[int], seed: int) -> None:
        self.conversation = Conversation((), seed=seed)
        """what was said, as texts"""
        self.finish_reason: FinishReason = "stop"
        self.seed = seed
        self._num_prompt = len(prompt_ids)
        self._ids = list(prompt_ids)
        self._logprobs: list[float] = []
        self._mask = bytearray()
        self._spans: list[VersionSpan] = []

    @property
    def token_ids(self) -> Sequence[int]:
        """Prompt and everything behind it [P + C]: what the next turn continues."""
        return self._ids

    @property
    def num_turns(self) -> int:
        """Turns that the policy has had."""
        return len(self.conversation.turns)

    @property
    def versions(self) -> set[PolicyVersion]:
        """Whose weights made the tokens."""
        return {span.version for span in self._spans}

    def add_turn(self, completion: Completion, text: str) -> None:
        """Append what was sampled; `text` is what it says."""
        start = len(self._mask)
        self._ids += completion.token_ids.numpy().tolist()
        self._logprobs += completion.logprobs.numpy().tolist()
        self._mask += b"\x01" * len(completion.token_ids)
        for span in completion.spans:
            self._extend(span.version, start + span.end)
        self.finish_reason = completion.finish_reason
        said = self.conversation
        self.conversation = msgspec.structs.replace(said, turns=(*said.turns, text))

    def add_reply(self, reply_ids: Sequence[int], text: str) -> None:
        """Append what the environment says: never trained, and of no version of its own."""
        self._ids += reply_ids
        self._logprobs += [0.0] * len(reply_ids)
        self._mask += b"\x00" * len(reply_ids)
        self._extend(self._spans[-1].version, len(self._mask))
        said = self.conversation
        self.conversation = msgspec.structs.replace(said, replies=(*said.replies, text))

    def note(self, state: Any) -> None:
        """Keep what the environment has left for its next step."""
        self.conversation = msgspec.structs.replace(self.conversation, state=state)

    def rollout(self, reward: float) -> Rollout:
        """Return the whole of it as one sample."""
        return Rollout(
            prompt_ids=Packed.of(self._ids[: self._num_prompt], "int32"),
            completion_ids=Packed.of(self._ids[self._num_prompt :], "int32"),
            behavior_logprobs=Packed.of(self._logprobs, "float32"),
            loss_mask=Packed("uint8", bytes(self._mask)),
            spans=tuple(self._spans),
            finish_reason=self.finish_reason,
            reward=reward,
            seed=self.seed,
        )

    def _extend(self, version: PolicyVersion, end: int) -> None:
        start = self._spans[-1].end if self._spans else 0
        if self._spans and self._spans[-1].version == version:
            start = self._spans.pop().start
        self._spans.append(VersionSpan(version, start, end))
