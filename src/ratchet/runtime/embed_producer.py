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

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final

from ratchet.actors.producer import GiveUp, HandedIn, HandIn, ProducerActor, PromptTaken, TakePrompt
from ratchet.config import Config
from ratchet.errors import ActorDead
from ratchet.runtime.embed_guest import Host, Member
from ratchet.runtime.embed_link import BackgroundLoop
from ratchet.runtime.embed_work import Samples, Work
from ratchet.types import Prompt

_REPLY_S: Final = 5.0


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

    async def finish(self, work: Work, trajectories: Sequence[Samples]) -> bool:
        """Hand a group in; tell whether its lease was still good."""
        group = work.group(trajectories, self._prompt_ids.vocabulary)
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

    def finish(self, work: Work, trajectories: Sequence[Samples]) -> bool:
        """Hand in all trajectories of a prompt, scored.

        Args:
            work: the prompt.
            trajectories: `group_size`, each a rollout, or its rollouts where it has several.

        Returns:
            False if the lease, as it is measured here, or the run had ended before: the group is
            too late to be used. The last word is the buffer's, whose clock began with the claim.

        Raises:
            ValueError: they are not `group_size` trajectories, or one could not be trained.
            VersionError: a version is none of this run's.
            RunFailed: the run has failed.
        """
        return self._background.call(self._own.finish(work, trajectories))

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

    async def finish(self, work: Work, trajectories: Sequence[Samples]) -> bool:
        """Hand in all trajectories of a prompt: see `Producer.finish`."""
        return await self._background.acall(self._own.finish(work, trajectories))

    async def fail(self, work: Work, reason: str = "generation", detail: str = "") -> None:
        """Give a prompt back: see `Producer.fail`."""
        await self._background.acall(self._own.fail(work, reason, detail))
