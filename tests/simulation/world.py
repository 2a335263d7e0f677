"""One simulated run: the four actors as they are, fakes around them, and what was seen of it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.helpers.actors import RecordingLog, make_system
from tests.simulation.network import Network
from tests.simulation.weights import FakeReceiver, FakeSender, Weights, Wire

from ratchet.actors.buffer import BufferActor
from ratchet.actors.ref import LocalRef
from ratchet.actors.role import BUFFER, REGISTRY, TRAINER, rollout_name
from ratchet.actors.rollout import RolloutActor
from ratchet.actors.system import System
from ratchet.actors.trainer import TrainerActor
from ratchet.actors.version_registry import VersionRegistry
from ratchet.backends.rollout.base import SamplingParams
from ratchet.backends.rollout.fake import FakeEngine, fake_token
from ratchet.backends.training.base import GradientReport, StepReport
from ratchet.backends.training.fake import FakeBackend
from ratchet.config import Config
from ratchet.errors import GenerationFailed, RewardFailed
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


class RecordingBackend(FakeBackend):
    """Remembers which attempt of which group changed the weights."""

    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.applied: list[tuple[int, int]] = []
        self._keys: list[tuple[int, int]] = []

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        self._keys = [(group.group_id, group.attempt) for group in groups]
        return await super().forward_backward(groups)

    async def optimizer_step(self) -> StepReport:
        report = await super().optimizer_step()
        if report.applied:
            self.applied += self._keys
        return report


def reward(text: str) -> float:
    """A reward that depends on the tokens."""
    return sum(map(ord, text)) % 7 / 6


class Scorer:
    """Scores by `reward`; it fails while `broken()` says so."""

    def __init__(self, broken: Callable[[], bool] = lambda: False) -> None:
        self._broken = broken

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        if self._broken():
            raise RewardFailed(f"no reward for {prompt.prompt_id}")
        return list(map(reward, completions))


class ProcessEnd:
    """A process ends with its actor."""

    def __init__(self, network: Network, name: str, system: System) -> None:
        self.name = name
        self.event = asyncio.Event()
        self.reason = ""
        self._network = network
        self.system = system

    def tell(self, message: Message) -> None:
        assert isinstance(message, Down)
        self.reason = message.reason
        self._network.kill(self.name, message.reason, only=self.system)
        self.event.set()


class Buffer(BufferActor):
    """Can be looked into."""

    last: Buffer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        Buffer.last = self


class SeenTrainer(TrainerActor):
    """Can be looked into."""

    last: SeenTrainer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        SeenTrainer.last = self


class SeenEngine(FakeEngine):
    """Remembers each version that it was stamped with, and the weights that it held then."""

    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.stamped: list[tuple[int, Weights]] = []

    async def stamp(self, version: int) -> None:
        await super().stamp(version)
        self.stamped.append((version, self.weights))


class KeptVersions(VersionStore):
    """Can be read after its registry has stopped."""

    def close(self) -> None:
        pass


class KeptLedger(GroupLedger):
    """Can be read after its buffer has stopped."""

    def close(self) -> None:
        pass


@dataclass
class Delays:
    """Seconds of everything that takes time in a world."""

    step_s: float = 10.0
    token_s: float = 1.0
    move_s: float = 0.5
    load_s: float = 0.1
    message_s: float = 0.002
    tail_share: float = 0.0
    tail_s: float = 0.0


@dataclass
class Trouble:
    """What goes wrong at the rollouts now: shares of the calls."""

    reward: float = 0.0
    generation: float = 0.0
    hang: float = 0.0


@dataclass(eq=False)
class Trainer:
    """One life of a trainer, with what it left behind."""

    name: str
    system: System
    backend: RecordingBackend
    output: Output
    end: ProcessEnd
    ref: LocalRef
    actor: TrainerActor
    killed: bool = False


@dataclass(eq=False)
class Worker:
    """One life of a rollout worker."""

    name: str
    incarnation: str
    system: System
    engine: SeenEngine
    end: ProcessEnd


class World:
    """Build it, `start` it on a virtual loop, and wait for `ended`."""

    def __init__(
        self, config: Config, *, seed: int, delays: Delays | None = None, num_prompts: int = 50
    ) -> None:
        self.config = config
        self.delays = delays or Delays()
        self.network = Network(
            seed,
            mean_delay_s=self.delays.message_s,
            tail_share=self.delays.tail_share,
            tail_s=self.delays.tail_s,
        )
        self.wire = Wire(
            move_s=self.delays.move_s,
            load_s=self.delays.load_s,
            timeout_s=config.weights.timeout_s,
        )
        self.trouble = Trouble()
        self.logs: dict[str, RecordingLog] = {}
        self.trainers: list[Trainer] = []
        self.workers: dict[str, Worker] = {}
        self.lost_workers: list[tuple[str, str]] = []
        """(name, reason) of workers that ended on their own"""
        self.ends: dict[str, ProcessEnd] = {}
        self.batches: list[BatchReady] = []
        self.buffer: BufferActor
        self._supervisors: list[asyncio.Task[None]] = []
        self._seed = seed
        self._delays = random.Random(seed + 1)
        self._ids = itertools.count()
        self._prompts = [Prompt(f"p{i}", f"problem {i}") for i in range(num_prompts)]
        self.store = KeptVersions.open(None)
        self.ledger = KeptLedger.open(None)
        self.network.observers.append(self._observe)

    def start(self) -> None:
        system = self._process(REGISTRY)
        registry = VersionRegistry.start(system, REGISTRY, store=self.store)
        self._watch(registry, REGISTRY, system)
        system = self._process(BUFFER)
        buffer = Buffer.start(
            system,
            self._role("buffer", BUFFER),
            config=self.config,
            prompts=self._prompts,
            ledger=self.ledger,
        )
        self.buffer = Buffer.last
        self._watch(buffer, BUFFER, system)
        for rank in range(self.config.rollout.num_workers):
            self.start_rollout(rollout_name(rank))
        self.start_trainer(TRAINER)

    def start_trainer(self, name: str) -> None:
        """Start a trainer; an older one of that name can no longer be reached, and lives on."""
        step_s = self.delays.step_s
        backend = RecordingBackend(
            size=4,
            seed=self._seed + len(self.trainers),
            forward_backward_s=step_s * 0.8,
            optimizer_s=step_s * 0.2,
        )
        system, output = self._process(name), Output()
        ref = SeenTrainer.start(
            system,
            self._role("trainer", name),
            config=self.config,
            backend=backend,
            sender=FakeSender(self.wire, lambda: backend.weights),
            output=output,
            warm_start_prompts=[],
        )
        end = self._watch(ref, name, system)
        self.trainers.append(Trainer(name, system, backend, output, end, ref, SeenTrainer.last))

    def start_rollout(self, name: str) -> None:
        """Start a worker, unless it runs."""
        if self.network.system(name) is not None:
            return
        system, role = self._process(name), self._role("rollout", name)
        engine = SeenEngine(delay_s=self._delay)
        ref = RolloutActor.start(
            system,
            role,
            config=self.config,
            engine=engine,
            receiver=FakeReceiver(self.wire),
            scorer=Scorer(lambda: self._strikes(self.trouble.reward)),
            eval_prompts=[Prompt(f"e{i}", f"held out {i}") for i in range(8)],
        )
        end = self._watch(ref, name, system)
        worker = self.workers[name] = Worker(name, role.incarnation, system, engine, end)
        self._supervisors.append(asyncio.ensure_future(self._supervise(worker)))

    async def _supervise(self, worker: Worker) -> None:
        """Start a worker again that ended on its own; killed ones are somebody else's."""
        await worker.end.event.wait()
        if worker.end.reason not in {"cancelled", "stopped"}:
            self.lost_workers.append((worker.name, worker.end.reason))
            await asyncio.sleep(1.0)
            self.start_rollout(worker.name)

    @property
    def leader(self) -> Trainer:
        """The trainer with the highest term of those since the last kill that are not fenced."""
        killed = [index for index, trainer in enumerate(self.trainers) if trainer.killed]
        candidates = self.trainers[killed[-1] + 1 if killed else 0 :][::-1]
        fit = [trainer for trainer in candidates if "StaleTerm" not in trainer.end.reason]
        return max(fit or candidates, key=lambda trainer: trainer.actor._publisher.term)

    @property
    def trainer(self) -> LocalRef:
        """The leader."""
        return self.leader.ref

    @property
    def ended(self) -> ProcessEnd:
        """The end of the leader."""
        return self.leader.end

    @property
    def output(self) -> Output:
        """What the leader wrote."""
        return self.leader.output

    @property
    def backend(self) -> RecordingBackend:
        """The model of the leader."""
        return self.leader.backend

    def trained_tokens_are_those_of_their_versions(self) -> int:
        """Compute every token of every batch again from the weights that its stamp names."""
        count = 0
        for ready in self.batches:
            for group in ready.batch.groups:
                count += self.check_group(group)
        return count

    def check_group(self, group: RolloutGroup) -> int:
        """Compute every token of a group again; return how many there are."""
        count = 0
        assert len({rollout.seed for rollout in group.rollouts}) == len(group.rollouts), group
        for rollout in group.rollouts:
            text = bytes(rollout.completion_ids.numpy().tolist()).decode("latin-1")
            assert rollout.reward == reward(text), (group.group_id, rollout.reward)
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
        if self._strikes(self.trouble.generation):
            raise GenerationFailed("the engine has a bad day")
        if self._strikes(self.trouble.hang):
            return 1e7
        # heavy tail: some completions take many times the median
        return self.delays.token_s * params.max_tokens * min(self._delays.paretovariate(1.5), 8.0)

    def _strikes(self, share: float) -> bool:
        return share > 0 and self._delays.random() < share

    def _observe(self, sender: str, receiver: str, message: Message) -> None:
        if isinstance(message, BatchReady):
            self.batches.append(message)

    def _watch(self, ref: LocalRef, name: str, system: System) -> ProcessEnd:
        end = self.ends[name] = ProcessEnd(self.network, name, system)
        ref.watch(end)
        return end

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
