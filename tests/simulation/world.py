"""One simulated run: the four actors as they are, fakes around them, and what was seen of it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from tests.helpers.actors import RecordingLog, make_system
from tests.simulation.network import Network
from tests.simulation.weights import FakeReceiver, FakeSender, Wire

from ratchet.actors.buffer import BufferActor
from ratchet.actors.role import BUFFER, REGISTRY, TRAINER, rollout_name
from ratchet.actors.rollout import RolloutActor
from ratchet.actors.system import System
from ratchet.actors.trainer import TrainerActor
from ratchet.actors.version_registry import VersionRegistry
from ratchet.backends.rollout.base import SamplingParams
from ratchet.backends.rollout.fake import FakeEngine, fake_token
from ratchet.backends.training.fake import FakeBackend
from ratchet.config import Config
from ratchet.messages import BatchReady, Down, Message
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.versions import VersionStore
from ratchet.types import Prompt, RoleInfo, RolloutGroup


class Output:
    """Keeps what the trainer would write."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.summaries: list[dict[str, Any]] = []

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.lines.append(dict(metrics))

    def summary(self, summary: Mapping[str, Any]) -> None:
        self.summaries.append(dict(summary))

    async def model(self, backend: object) -> None:
        pass


class Scorer:
    """A reward that depends on the tokens."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        return [sum(map(ord, text)) % 7 / 6 for text in completions]


class ProcessEnd:
    """A process ends with its actor."""

    def __init__(self, network: Network, name: str) -> None:
        self.name = name
        self.event = asyncio.Event()
        self._network = network

    def tell(self, message: Message) -> None:
        assert isinstance(message, Down)
        self._network.kill(self.name, message.reason)
        self.event.set()


class World:
    """Build it, `start` it on a virtual loop, and wait for `ended`."""

    def __init__(self, config: Config, *, seed: int, step_s: float, token_s: float) -> None:
        self.config = config
        self.network = Network(seed)
        self.wire = Wire()
        self.output = Output()
        self.backend = FakeBackend(
            size=4, seed=seed, forward_backward_s=step_s * 0.8, optimizer_s=step_s * 0.2
        )
        self.logs: dict[str, RecordingLog] = {}
        self.batches: list[BatchReady] = []
        self._token_s = token_s
        self._delays = random.Random(seed + 1)
        self._ids = itertools.count()
        self._prompts = [Prompt(f"p{i}", f"problem {i}") for i in range(50)]
        self.store = VersionStore.open(None)
        self.ledger = GroupLedger.open(None)
        self.network.observers.append(self._observe)

    def start(self) -> None:
        registry = VersionRegistry.start(self._process(REGISTRY), REGISTRY, store=self.store)
        registry.watch(ProcessEnd(self.network, REGISTRY))
        buffer = BufferActor.start(
            self._process(BUFFER),
            self._role("buffer", BUFFER),
            config=self.config,
            prompts=self._prompts,
            ledger=self.ledger,
        )
        buffer.watch(ProcessEnd(self.network, BUFFER))
        for rank in range(self.config.rollout.num_workers):
            self.start_rollout(rollout_name(rank))
        self.trainer = TrainerActor.start(
            self._process(TRAINER),
            self._role("trainer", TRAINER),
            config=self.config,
            backend=self.backend,
            sender=FakeSender(self.wire, lambda: self.backend.weights),
            output=self.output,
            warm_start_prompts=[],
        )
        self.ended = ProcessEnd(self.network, TRAINER)
        self.trainer.watch(self.ended)

    def start_rollout(self, name: str) -> None:
        RolloutActor.start(
            self._process(name),
            self._role("rollout", name),
            config=self.config,
            engine=FakeEngine(delay_s=self._delay),
            receiver=FakeReceiver(self.wire),
            scorer=Scorer(),
            eval_prompts=[Prompt(f"e{i}", f"held out {i}") for i in range(8)],
        )

    def trained_tokens_are_those_of_their_versions(self) -> int:
        """Compute every token of every batch again from the weights that its stamp names."""
        count = 0
        for ready in self.batches:
            for group in ready.batch.groups:
                count += self._check_group(group)
        return count

    def _check_group(self, group: RolloutGroup) -> int:
        count = 0
        for rollout in group.rollouts:
            prompt = rollout.prompt_ids.numpy().tolist()
            tokens = rollout.completion_ids.numpy().tolist()
            for span in rollout.spans:
                weights = self.wire.sent[span.version]
                for position in range(span.start, span.end):
                    expected, _ = fake_token(weights, prompt, rollout.seed, position)
                    assert tokens[position] == expected, (group.group_id, span)
                    count += 1
        return count

    def _delay(self, prompt_ids: Sequence[int], params: SamplingParams) -> float:
        # heavy tail: some completions take many times the median
        return self._token_s * params.max_tokens * min(self._delays.paretovariate(1.5), 8.0)

    def _observe(self, receiver: str, message: Message) -> None:
        if isinstance(message, BatchReady):
            self.batches.append(message)

    def _process(self, name: str) -> System:
        log = self.logs[name] = RecordingLog()
        system = make_system(
            new_id=lambda: f"id-{next(self._ids)}",
            log=log,
            ask_timeout_s=self.config.runtime.ask_timeout_s,
        )
        self.network.attach(name, system)
        return system

    def _role(self, kind: Any, name: str) -> RoleInfo:
        return RoleInfo(kind, name, f"life-{next(self._ids)}")
