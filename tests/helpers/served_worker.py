"""One rollout worker with samples of heavy-tailed lengths, served by a buffer of a few lines.

On virtual time. The trainer is faster than the engine: a finished group leaves the buffer at once.
Each sample takes as long as its seed says, so that every submission makes the very same samples.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tests.helpers.actors import make_system
from tests.helpers.config import small_config
from tests.helpers.refs import RecordedDirectory
from tests.helpers.scoring import SingleTurn
from tests.simulation.loop import run_virtual
from tests.simulation.weights import FakeReceiver, Wire

from ratchet.actors.actor import LocalRef
from ratchet.actors.rollout import RolloutActor
from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.backends.rollout.fake import NAME, FakeEngine
from ratchet.messages import (
    ClaimPrompts,
    GroupFinished,
    Message,
    PromptsClaimed,
    RoleJoined,
    RoleRegistered,
)
from ratchet.transport.mailbox.base import Recipient
from ratchet.types import Assignment, Prompt, RoleInfo

BUFFER = RoleInfo("buffer", "buffer", "b1")
ROLE = RoleInfo("rollout", "rollout-0", "life-1")
LEASE_S = 1e6


class Work(NamedTuple):
    """What there is to do, and where."""

    num_groups: int
    group_size: int
    slots: int
    """groups"""
    capacity: int
    """groups that the buffer lets be in flight"""
    sigma: float = 1.5
    """of the lengths, which are lognormal with a median of 1 s"""


class Served(NamedTuple):
    """How it went."""

    took_s: float
    idle_share: float
    """of the slots' time"""
    most_groups: int
    """in flight at once"""
    most_samples: int
    early_claims: int
    """of a further group, while none had ended since the last claim"""


class BusyEngine(FakeEngine):
    """Takes as long for a sample as its seed says, and knows how many it had at once."""

    def __init__(self, sigma: float) -> None:
        super().__init__(delay_s=lambda _, params: self.length(params))
        self._sigma = sigma
        self.now = self.most = 0
        self.work_s = 0.0

    def length(self, params: SamplingParams) -> float:
        """Seconds of a sample."""
        return random.Random(params.seed).lognormvariate(0.0, self._sigma)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """As it is, and counted."""
        self.now += 1
        self.most = max(self.most, self.now)
        self.work_s += self.length(params)
        try:
            return await super().generate(prompt_ids, params)
        finally:
            self.now -= 1


class Scorer(SingleTurn):
    """A reward at once."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        """One half for each."""
        del prompt
        return [0.5] * len(completions)

    def close(self) -> None:
        """Nothing to do."""


class FewLinesOfBuffer:
    """Hands out groups as long as there are credit, room and groups."""

    name = "buffer"

    def __init__(self, work: Work) -> None:
        self._work = work
        self._credit = self._issued = self._finished = 0
        self.most = self.early = 0
        self._ended = True
        self.done = asyncio.Event()
        self.ref: LocalRef

    def watch(self, watcher: Recipient) -> None:
        """It does not end."""

    def tell(self, message: Message) -> None:
        """Take a claim or a finish."""
        if isinstance(message, ClaimPrompts):
            if message.credit > self._credit:
                self._credit = message.credit
                self.early += not self._ended
                self._ended = False
        elif isinstance(message, GroupFinished):
            self._finished += 1
            self._ended = True
        if self._finished == self._work.num_groups:
            self.done.set()
        most = min(self._credit, self._finished + self._work.capacity, self._work.num_groups)
        for group_id in range(self._issued, most):
            prompt = Prompt(f"p{group_id}", "12>")
            assignment = Assignment(group_id, 0, 0, prompt, self._work.group_size, LEASE_S)
            self.ref.tell(PromptsClaimed(ROLE.incarnation, (assignment,), BUFFER.incarnation))
        self._issued = max(self._issued, most)
        self.most = max(self.most, self._issued - self._finished)


def serve(submission: str, work: Work) -> Served:
    """Let one worker make all groups."""

    async def main() -> Served:
        config = small_config(
            rollout={
                "group_size": work.group_size,
                "max_tokens": 1,
                "max_concurrent_groups": work.slots,
                "group_timeout_s": LEASE_S,
                "submission": submission,
            },
            buffer={"batch_groups": 1, "capacity_factor": float(work.capacity), "lease_s": LEASE_S},
        )
        others = RecordedDirectory()
        others.ref("registry").answer = lambda _: RoleRegistered((BUFFER,), ())
        buffer = FewLinesOfBuffer(work)
        others.refs["buffer"] = buffer  # type: ignore[assignment]
        engine = BusyEngine(work.sigma)
        await engine.write({NAME: np.zeros(4, np.float32)})
        await engine.stamp(0)
        buffer.ref = RolloutActor.start(
            make_system(remote=others),
            ROLE,
            config=config,
            engine=engine,
            receiver=FakeReceiver(Wire()),
            scorer=Scorer(),
            eval_prompts=(),
        )
        buffer.ref.tell(RoleJoined(RoleInfo("buffer", "buffer", "b1")))
        began = asyncio.get_running_loop().time()
        await buffer.done.wait()
        took_s = asyncio.get_running_loop().time() - began
        await buffer.ref.stop(block=False)
        slots = work.slots * work.group_size
        idle_share = 1 - engine.work_s / (slots * took_s)
        return Served(took_s, idle_share, buffer.most, engine.most, buffer.early)

    return run_virtual(main())
