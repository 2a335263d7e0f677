"""A producer of the user's own: prompts out, scored groups in, from an engine that the run does not
know.

Consumes prompts that the buffer leases, and rollouts that the user's code has made of them;
produces groups like those of any rollout worker. Waits for a prompt as long as it is told to.

What a version means here: a token carries the version whose weights made it, and the producer is
taken at its word, because it alone knows. So it may only name a version whose weights it really
holds; see docs/embedding.md. What can be checked is checked before a group leaves: a malformed one
would fail the trainer, far from its cause.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ratchet.actors.producer import GiveUp, HandedIn, HandIn, ProducerActor, PromptTaken, TakePrompt
from ratchet.config import Config
from ratchet.errors import ActorDead
from ratchet.runtime.embed_guest import Host, Member
from ratchet.runtime.embed_link import BackgroundLoop
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

_REPLY_S: Final = 5.0
_DTYPES: Final = ("int32", "int32", "float32", "uint8")
Spans = Sequence[VersionSpan]


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
        """Rollouts that make a group."""
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
    ) -> Rollout:
        """Make a rollout of one completion.

        Args:
            completion_ids: C token ids of the policy's tokenizer, the end of sequence included.
            logprobs: C natural logs of the probability in the very distribution sampled from.
            reward: a finite number.
            version: whose weights made the tokens; spans where they changed on the way.
            finish_reason: "stop", or "length" where it was cut off.
            loss_mask: 1 where a token is trained; all of them by default.
            seed: that would make it again, if there is one.
        """
        num = len(completion_ids)
        mask = loss_mask if loss_mask is not None else [1] * num
        spans = (VersionSpan(version, 0, num),) if isinstance(version, int) else tuple(version)
        return Rollout(
            prompt_ids=Packed.of(self.prompt_ids, "int32"),
            completion_ids=Packed.of(completion_ids, "int32"),
            behavior_logprobs=Packed.of(logprobs, "float32"),
            loss_mask=Packed.of(mask, "uint8"),
            spans=spans,
            finish_reason=finish_reason,
            reward=float(reward),
            seed=seed,
        )

    def group(self, rollouts: Sequence[Rollout], vocabulary: int) -> RolloutGroup:
        """Put the rollouts together.

        Raises:
            ValueError: if they are not `group_size`, or one of them cannot be trained.
        """
        if len(rollouts) != self.group_size:
            msg = (
                f"a group has {self.group_size} rollouts (rollout.group_size), not {len(rollouts)}"
            )
            raise ValueError(msg)
        for index, rollout in enumerate(rollouts):
            problem = what_is_wrong(rollout, vocabulary)
            if problem is not None:
                msg = f"rollout {index} of prompt {self.prompt.prompt_id!r}: {problem}"
                raise ValueError(msg)
        assignment = self.assignment
        return RolloutGroup(
            assignment.group_id,
            assignment.attempt,
            self.prompt.prompt_id,
            assignment.epoch,
            tuple(rollouts),
        )


def what_is_wrong(rollout: Rollout, vocabulary: int) -> str | None:
    """Return why a rollout cannot be trained; None if it can."""
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


class OwnProducer:
    """The user's code, as its `ProducerActor` sees it. On the background loop only."""

    def __init__(self, host: Host, member: Member, prompt_ids: PromptIds) -> None:
        self._config: Config = host.config
        self._member = member
        self._prompt_ids = prompt_ids

    async def next_work(self, timeout_s: float | None) -> Work | None:
        """Return the next prompt; None when the run is over."""
        within_s = self._config.trainer.batch_timeout_s if timeout_s is None else timeout_s
        try:
            taken: PromptTaken = await self._member.ref.ask(
                TakePrompt(within_s), block=False, timeout=within_s + _REPLY_S
            )
        except ActorDead:
            await self._member.ended()  # raises if it was not in order
            return None
        ids = self._prompt_ids.encode(taken.assignment.prompt)
        return Work(taken.assignment, ids)

    async def finish(self, work: Work, rollouts: Sequence[Rollout]) -> bool:
        """Hand a group in; tell whether its lease was still good."""
        group = work.group(rollouts, self._prompt_ids.vocabulary)
        try:
            handed: HandedIn = await self._member.ref.ask(HandIn(group), block=False)
        except ActorDead:
            await self._member.ended()
            return False
        return handed.in_time

    async def fail(self, work: Work, reason: str, detail: str) -> None:
        """Give a group back."""
        self._member.ref.tell(GiveUp(work.assignment, reason, detail))


class PromptIds:
    """Prompts as the policy's tokenizer encodes them."""

    def __init__(self, host: Host) -> None:
        from ratchet.backends.models import load_tokenizer

        self._tokenizer = load_tokenizer(host.base_model())
        self._chat_template = host.config.model.chat_template
        self.vocabulary = len(self._tokenizer)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the ids of a prompt."""
        from ratchet.backends.models import encode_prompt

        return tuple(encode_prompt(self._tokenizer, prompt.text, chat_template=self._chat_template))


async def start_producer(host: Host, name: str | None, ahead: int) -> OwnProducer:
    """Register a producer."""
    prompt_ids = PromptIds(host)
    member = await host.new_member("producer", name)
    ref = ProducerActor.start(member.system, member.role, ahead=ahead)
    member.started(ref, host.config.runtime.heartbeat_s)
    return OwnProducer(host, member, prompt_ids)


class Producer:
    """Your engine's hold on a run. See `ratchet.join`."""

    def __init__(self, background: BackgroundLoop, own: OwnProducer) -> None:
        self._background = background
        self._own = own

    def prompts(self, timeout_s: float | None = None) -> Iterator[Work]:
        """Yield prompts until the run is over; each is yours to `finish` or to `fail`.

        A prompt is claimed when you ask for it, and its lease begins. One that you do neither with
        is issued again, to whoever asks, when its lease ends.

        Args:
            timeout_s: how long to wait for one; `trainer.batch_timeout_s` by default. None come
                while the buffer is full.

        Raises:
            AskTimeout: none came in that time.
            RunFailed: the run has failed.
        """
        while (work := self._background.call(self._own.next_work(timeout_s))) is not None:
            yield work

    def finish(self, work: Work, rollouts: Sequence[Rollout]) -> bool:
        """Hand in all rollouts of a prompt, scored.

        Returns:
            False if the lease, as it is measured here, or the run had ended before: the group is
            too late to be used. The last word is the buffer's, whose clock began with the claim.

        Raises:
            ValueError: they are not `group_size`, or one of them could not be trained.
            VersionError: a version is none of this run's.
            RunFailed: the run has failed.
        """
        return self._background.call(self._own.finish(work, rollouts))

    def fail(self, work: Work, reason: str = "generation", detail: str = "") -> None:
        """Give a prompt back: a failure, not a zero reward (`buffer.unused` decides what follows).

        Args:
            work: the prompt.
            reason: one word: "generation", "reward", "prompt" or "timeout".
            detail: for the log.
        """
        self._background.call(self._own.fail(work, reason, detail))


class AsyncProducer:
    """`Producer`, for code that awaits; its calls may run side by side."""

    def __init__(self, background: BackgroundLoop, own: OwnProducer) -> None:
        self._background = background
        self._own = own

    async def prompts(self, timeout_s: float | None = None) -> AsyncIterator[Work]:
        """Yield prompts: see `Producer.prompts`."""
        while (work := await self._background.acall(self._own.next_work(timeout_s))) is not None:
            yield work

    async def finish(self, work: Work, rollouts: Sequence[Rollout]) -> bool:
        """Hand in all rollouts of a prompt: see `Producer.finish`."""
        return await self._background.acall(self._own.finish(work, rollouts))

    async def fail(self, work: Work, reason: str = "generation", detail: str = "") -> None:
        """Give a prompt back: see `Producer.fail`."""
        await self._background.acall(self._own.fail(work, reason, detail))
