"""A rollout actor on a fake engine, in virtual time; registry and buffer are recorders."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from tests.helpers.actors import RecordingLog, make_system
from tests.helpers.config import small_config
from tests.helpers.refs import RecordedDirectory, RecordedRef
from tests.helpers.scoring import SingleTurn
from tests.simulation.loop import run_virtual
from tests.simulation.weights import FakeReceiver, Passage, Wire, digest_of

from ratchet.actors.rollout import RolloutActor
from ratchet.backends.rollout.fake import FakeEngine
from ratchet.messages import (
    ClaimPrompts,
    GroupFailed,
    GroupFinished,
    LoadWeights,
    Message,
    PromptsClaimed,
    RoleRegistered,
    WeightsLoaded,
)
from ratchet.types import Assignment, Prompt, RoleInfo, WeightManifest, WeightRoute

BUFFER = RoleInfo("buffer", "buffer", "b1")
ROLE = RoleInfo("rollout", "rollout-0", "life-1")
SLOTS = 3
TIMEOUT_S = 10.0
TOKENS = 4


class Scorer(SingleTurn):
    """One reward after another; an exception is raised."""

    def __init__(self, *outcomes: list[float] | Exception) -> None:
        self.outcomes = list(outcomes)

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        outcome = self.outcomes.pop(0) if self.outcomes else [0.5] * len(completions)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self) -> None:
        pass


class World:
    """A rollout actor on a fake engine; registry and buffer are recorders."""

    def __init__(self, *outcomes: Any, role: RoleInfo = ROLE, **engine: Any) -> None:
        self.config = small_config(
            rollout={
                "max_tokens": TOKENS,
                "group_size": 2,
                "group_timeout_s": TIMEOUT_S,
                "max_concurrent_groups": SLOTS,
            }
        )
        self.log = RecordingLog()
        self.others = RecordedDirectory()
        self.others.ref("registry").answer = lambda _: RoleRegistered((BUFFER,), ())
        self.system = make_system(remote=self.others, log=self.log)
        self.wire = Wire()
        self.engine = FakeEngine(**engine)
        self.ref = RolloutActor.start(
            self.system,
            role,
            config=self.config,
            engine=self.engine,
            receiver=FakeReceiver(self.wire),
            scorer=Scorer(*outcomes),
            eval_prompts=[Prompt(f"e{i}", f"held out {i}") for i in range(3)],
        )

    @property
    def buffer(self) -> RecordedRef:
        return self.others.ref("buffer")

    @property
    def credit(self) -> list[int]:
        claims = self.buffer.of(ClaimPrompts)
        assert all((c.worker, c.incarnation) == (ROLE.name, ROLE.incarnation) for c in claims)
        return [claim.credit for claim in claims]

    async def tell(self, *messages: Message) -> None:
        for message in messages:
            self.ref.tell(message)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(40):
            await asyncio.sleep(0)

    def offer(
        self, version: int, term: int = 1, *, to: str = ROLE.incarnation
    ) -> asyncio.Future[WeightsLoaded]:
        """Ask it to load; `arrive` ends the transfer."""
        group = f"group-{version}-{term}"
        loop = asyncio.get_running_loop()
        passage = Passage(ROLE.name, loop.create_future(), loop.create_future())
        self.wire.passages[group] = passage
        manifest = WeightManifest(term, version, version, (), (), {})
        route = WeightRoute("fake", "none", "", 0, group, 1, 2, 60)
        return asyncio.ensure_future(
            self.ref.ask(LoadWeights(to, manifest, route), block=False, timeout=60)
        )

    def arrive(self, version: int, term: int = 1, *, size: int = 4) -> None:
        weights = np.full(size, version, np.float32)
        passage = self.wire.passages[f"group-{version}-{term}"]
        passage.arrival.set_result((weights, digest_of(weights)))

    async def load(self, version: int, term: int = 1) -> WeightsLoaded:
        reply = self.offer(version, term)
        self.arrive(version, term)
        return await reply

    async def assign(self, *group_ids: int, text: str = "12>", attempt: int = 0) -> None:
        assignments = tuple(
            Assignment(group_id, attempt, 0, Prompt(f"p{group_id}", text), 2, 30.0)
            for group_id in group_ids
        )
        await self.tell(PromptsClaimed(ROLE.incarnation, assignments, BUFFER.incarnation))

    @property
    def finished(self) -> list[GroupFinished]:
        return self.buffer.of(GroupFinished)

    @property
    def failed(self) -> list[GroupFailed]:
        return self.buffer.of(GroupFailed)


def scenario(
    body: Callable[[World], Awaitable[None]], *outcomes: Any, load: bool = True, **engine: Any
) -> None:
    async def main() -> None:
        world = World(*outcomes, **engine)
        await world.settle()
        if load:
            await world.load(0)
            await world.settle()
        await body(world)
        assert world.ref.is_alive(), world.log.events
        await world.ref.stop(block=False)

    run_virtual(main())
