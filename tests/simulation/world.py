"""One simulated run: the four actors as they are, fakes around them, and what was seen of it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tests.simulation.batch_marks import Marks
from tests.simulation.counter_checks import Ledgered
from tests.simulation.disk import synced
from tests.simulation.fabric import Fabric
from tests.simulation.launcher import KILLED, Launcher
from tests.simulation.loop import VirtualLoop
from tests.simulation.payloads import WorldPayloads
from tests.simulation.rollout_draws import draw_turns, stop_after
from tests.simulation.sessions import Host, Network
from tests.simulation.standby import Standby
from tests.simulation.weight_ends import (
    NUM_PARTS,
    PART,
    HeldSnapshot,
    RecordingSender,
    SeenEngine,
    SeenReceiver,
    Sink,
    Source,
    Weights,
    in_memory,
)

from ratchet.actors.buffer import BufferActor
from ratchet.actors.ref import LocalRef
from ratchet.actors.role import BUFFER, ORDERLY, REGISTRY, TRAINER, evaluator_name, rollout_name
from ratchet.actors.rollout import RolloutActor
from ratchet.actors.trainer import TrainerActor
from ratchet.actors.trajectory import turn_seed
from ratchet.actors.version_registry import VersionRegistry
from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.backends.rollout.fake import fake_token
from ratchet.backends.training.base import GradientReport, StepReport
from ratchet.backends.training.fake import FakeBackend
from ratchet.config import Config
from ratchet.errors import GenerationFailed, RewardFailed
from ratchet.messages import (
    BatchReady,
    Down,
    Message,
    RequestBatch,
    RoleRegistered,
    VersionUpdated,
)
from ratchet.stats import BufferStats
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.versions import VersionStore
from ratchet.tasks.base import Conversation, Step
from ratchet.transport.mailbox.limits import Limits
from ratchet.types import Prompt, RoleInfo, Rollout, RolloutGroup

if TYPE_CHECKING:
    from tests.helpers.actors import RecordingLog
    from tests.simulation.disk import Disk
    from tests.simulation.trainers import WorldCheckpoints

    from ratchet.actors.checkpointing import StartingPoint


class Output:
    """Keeps what the trainer would write."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.summaries: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []

    def begin(self, step: int) -> None:
        pass

    def step(self, metrics: Mapping[str, Any]) -> None:
        self.lines.append(dict(metrics))

    def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        self.evaluations.append(dict(evaluation))

    def summary(self, summary: Mapping[str, Any]) -> None:
        self.summaries.append(dict(summary))

    async def model(self, backend: object) -> None:
        pass


class RecordingBackend(FakeBackend):
    """Remembers which attempt of which group changed the weights."""

    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.applied: list[tuple[int, int]] = []
        self.steps: list[list[tuple[int, int]]] = []
        """the same, by step"""
        self.trained_versions: dict[tuple[int, int], set[int]] = {}
        """of the tokens of each that the loss mask left"""
        self.trained_rollouts: dict[tuple[int, int], tuple[bool, ...]] = {}
        """of each rollout of each, whether a token was trained"""
        self._given: dict[tuple[int, int], set[int]] = {}
        self._rollouts: dict[tuple[int, int], tuple[bool, ...]] = {}

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        given = {(group.group_id, group.attempt): _trained_versions(group) for group in groups}
        self._given = {key: versions for key, versions in given.items() if versions}
        self._rollouts = {
            (g.group_id, g.attempt): tuple(r.num_trained_tokens > 0 for r in g.rollouts)
            for g in groups
        }
        return await super().forward_backward(groups)

    async def optimizer_step(self) -> StepReport:
        report = await super().optimizer_step()
        if report.applied:
            self.applied += self._given
            self.steps.append(list(self._given))
            self.trained_versions |= self._given
            self.trained_rollouts |= self._rollouts
        return report


def _trained_versions(group: RolloutGroup) -> set[int]:
    return {
        span.version
        for rollout in group.rollouts
        for span in rollout.spans
        if 1 in rollout.loss_mask.numpy()[span.start : span.end]
    }


def answer(turn: str) -> str | None:
    """What the environment says to a turn, if anything."""
    return None if reward(turn) > 0.8 else "so?"


def whole(conversation: Conversation) -> str:
    """Everything behind the prompt."""
    pairs = itertools.zip_longest(conversation.turns, conversation.replies, fillvalue="")
    return "".join(itertools.chain.from_iterable(pairs))


class AbortingEngine(SeenEngine):
    """Says of some completions that they were aborted."""

    def __init__(self, aborts: Callable[[], bool], **script: Any) -> None:
        super().__init__(**script)
        self._aborts = aborts

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        completion = await super().generate(prompt_ids, params)
        return completion._replace(finish_reason="abort") if self._aborts() else completion


def reward(text: str) -> float:
    """A reward that depends on the tokens."""
    return sum(map(ord, text)) % 7 / 6


class Scorer:
    """Scores by `reward`; it fails while `broken()` says so, and so does its environment."""

    def __init__(self, broken: Callable[[], bool] = lambda: False, num_turns: int = 1) -> None:
        self._broken = broken
        self._num_turns = num_turns

    def max_turns(self, prompt: Prompt) -> int:
        del prompt
        return self._num_turns

    async def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        if self._broken():
            raise RewardFailed(f"no answer for {prompt.prompt_id}")
        number = len(conversation.turns)
        assert conversation.state == (None if number == 1 else number - 1), conversation
        return Step(answer(conversation.turns[-1]), state=number)

    async def score_conversations(
        self, prompt: Prompt, conversations: Sequence[Conversation]
    ) -> list[float]:
        return await self.score(prompt, list(map(whole, conversations)))

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        if self._broken():
            raise RewardFailed(f"no reward for {prompt.prompt_id}")
        return list(map(reward, completions))

    def close(self) -> None:
        pass


def turns_of(rollout: Rollout) -> list[tuple[int | None, int]]:
    """Return (turn, where it starts) of each token; the turn is None for the environment's."""
    turns: list[tuple[int | None, int]] = []
    number, start = -1, 0
    sampled = [logprob != 0.0 for logprob in rollout.behavior_logprobs.numpy().tolist()]
    for position, here in enumerate(sampled):
        if here and not (position and sampled[position - 1]):
            number, start = number + 1, position
        turns.append((number if here else None, start))
    return turns


class ProcessEnd:
    """A process ends with its actor."""

    def __init__(self, network: Network, host: Host) -> None:
        self.host = host
        self.name = host.name
        self.event = asyncio.Event()
        self.reason = ""
        self.at = 0.0
        """when"""
        self._network = network
        self._leaving: asyncio.Task[None] | None = None

    def tell(self, message: Message) -> None:
        """Hear of the actor's end, inside its process."""
        assert isinstance(message, Down)
        self.reason = message.reason
        self._leaving = asyncio.ensure_future(self._leave())

    async def _leave(self) -> None:
        await self.host.node.stop(1.0)
        self.kill(self.reason)

    def kill(self, reason: str = KILLED) -> None:
        """End the process now."""
        if not self.event.is_set():
            self.reason = reason
            self.at = self._network.loop.now
            self.event.set()
            self._network.kill(self.host)


class Buffer(BufferActor):
    """Can be looked into."""

    last: Buffer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.began = Ledgered.of(kwargs["ledger"])
        self.told: list[BufferStats] = []
        """what went out beside each batch"""
        super().__init__(*args, **kwargs)
        self.hears: list[Callable[[int, int], None]] = []
        """told of the term that each batch is handed to, and of the newest one it has heard of"""
        self._newest_term = self.asked_in_term = 0
        Buffer.last = self

    def receive(self, message: Any) -> None:
        terms: list[int] = []
        match message:
            case RequestBatch() if message.buffer == self.role.incarnation:
                terms = [message.term]
                self.asked_in_term = max(self.asked_in_term, message.term)
            case VersionUpdated():
                terms = [message.record.term]
            case RoleRegistered():
                terms = [record.term for record in message.versions]
            case _:
                pass
        self._newest_term = max([self._newest_term, *terms])
        super().receive(message)

    def _serve(self) -> list[tuple[str, BatchReady]]:
        before = self._batches.handed
        told = super()._serve()
        handed = self._batches.handed
        if handed is not None and handed is not before:
            self.told.append(handed[1].stats)
            for hear in self.hears:
                hear(handed[1].term, self._newest_term)
        return told


class SeenTrainer(TrainerActor):
    """Can be looked into."""

    last: SeenTrainer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        SeenTrainer.last = self


class KeptVersions(VersionStore):
    """Can be read after its registry has stopped."""

    def close(self) -> None:
        pass


class KeptLedger(GroupLedger):
    """Can be read after its buffer has stopped, or failed."""

    def abandon(self) -> None:
        pass

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


class Crash(NamedTuple):
    """What the disk holds after the end of a process."""

    name: str
    power: bool
    """the machine went down with it"""
    versions: Path
    ledger: Path


@dataclass
class Links:
    """How the processes of a world are connected."""

    limits: Limits = field(default_factory=Limits)
    drift: float = 0.0
    moves: bool = False
    launchers: Literal["one", "each"] = "one"
    """of all workers, whose end is the run's | each worker has its own"""


@dataclass
class Trouble:
    """What goes wrong at the rollouts now: shares of the calls."""

    reward: float = 0.0
    generation: float = 0.0
    hang: float = 0.0
    abort: float = 0.0


@dataclass(eq=False)
class Trainer:
    """One life of a trainer, with what it left behind."""

    name: str
    host: Host
    backend: RecordingBackend
    output: Output
    end: ProcessEnd
    ref: LocalRef
    actor: TrainerActor
    started: float
    """when"""
    killed: bool = False
    start: StartingPoint | None = None
    """the checkpoint that it goes on from"""
    parent: int = 0
    """the term that made that"""
    robbed: bool = False
    """the one before had finished a checkpoint, and there was none"""

    @property
    def incarnation(self) -> str:
        """Of its process."""
        return self.host.incarnation


@dataclass(eq=False)
class Worker:
    """One life of a rollout worker."""

    name: str
    incarnation: str
    host: Host
    engine: SeenEngine
    end: ProcessEnd
    ref: LocalRef
    receiver: SeenReceiver
    started: float
    """when"""


class World:
    """Build it, `start` it on a virtual loop, and wait for `ended`."""

    def __init__(
        self,
        config: Config,
        *,
        seed: int,
        delays: Delays | None = None,
        links: Links | None = None,
        num_prompts: int = 50,
        disk: Disk | None = None,
        checkpoints: WorldCheckpoints | None = None,
        payload_s: float | None = None,
        has_standby: bool = False,
    ) -> None:
        links = links or Links()
        self.checkpoints = checkpoints
        """with these, a trainer that dies is started again, by a launcher of its own"""
        self.trainer_launchers: list[Launcher] = []
        """the first one, and those of a standby that has taken over"""
        self.standby: Standby | None = None
        self._has_standby = has_standby
        self.begun = asyncio.Event()
        """there is a trainer"""
        self.config = config
        self.delays = delays or Delays()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.network = Network(
            loop,
            seed,
            limits=links.limits,
            mean_delay_s=self.delays.message_s,
            tail=(self.delays.tail_share, self.delays.tail_s),
            drift=links.drift,
            moves=links.moves,
        )
        self.wire = Fabric(
            loop,
            seed,
            move_s=self.delays.move_s / NUM_PARTS,
            held_s=self.network.wire.held_s,
        )
        self.network.deaths.append(self.wire.bury)
        self.weights_config = in_memory(config.weights)
        self.trouble = Trouble()
        self.logs: dict[str, RecordingLog] = {}
        self.trainers: list[Trainer] = []
        self.workers: dict[str, Worker] = {}
        self.lives: list[Worker] = []
        """every worker that ever was"""
        self.launchers: list[Launcher] = []
        self.ends: dict[str, ProcessEnd] = {}
        self.batches: list[BatchReady] = []
        self.buffer: Buffer
        self.buffer_says: list[Callable[[int, int], None]] = []
        self._launchers = links.launchers
        self._seed = seed
        self.num_turns = draw_turns(config, seed)
        self._delays = random.Random(seed + 1)
        self.eval_prompts = [Prompt(f"e{i}", f"held out {i}") for i in range(8)]
        self._prompts = [Prompt(f"p{i}", f"problem {i}") for i in range(num_prompts)]
        self.disk = disk
        self._payload_s = payload_s
        self.store = KeptVersions.open(disk and disk.versions)
        self.ledger = KeptLedger.open(disk and disk.ledger)
        self.reviving: set[str] = set()
        """registry and buffer, while they are dead and their next life is about to begin"""
        self.crashes: list[Callable[[Crash], None]] = []
        """told of each crash of a process that writes files"""
        self.network.observers.append(self._observe)

    def start(self) -> None:
        self._start_registry()
        self._start_buffer()
        names = [rollout_name(rank) for rank in range(self.config.rollout.num_workers)]
        for workers in [names] if self._launchers == "one" else [[name] for name in names]:
            self.launch(*workers)
        for rank in range(self.config.num_evaluators):  # each on a node of its own
            self.launch(evaluator_name(rank))
        if self.checkpoints is None:
            self.start_trainer(TRAINER)
        else:
            self._launch_trainer()
        if self._has_standby:
            suspect_s = self.network.limits.suspect_s
            self.standby = Standby(self._start, return_s=suspect_s, take_over=self._take_over)

    def _take_over(self) -> Launcher:
        # on another machine, which is not cut off; a wire knows its ends by name, so the old one's
        # comes back as well
        self.network.wire.heal(TRAINER)
        return self._launch_trainer()

    def _launch_trainer(self) -> Launcher:
        launcher = Launcher(
            self.network,
            f"launcher-trainer-{len(self.trainer_launchers)}",
            [TRAINER],
            config=self.config,
            start=self.start_trainer,
            whose="run",
        )
        self.trainer_launchers.append(launcher)
        return launcher

    def _start_registry(self) -> None:
        # longer than a standby waits, in a world of any scale
        wait_s = 4 * self.network.limits.dead_s if self._has_standby else 600.0
        self._start(
            REGISTRY,
            lambda host: VersionRegistry.start(
                host.system, REGISTRY, store=self.store, trainer_wait_s=wait_s
            ),
        )

    def _start_buffer(self) -> None:
        self._start(
            BUFFER,
            lambda host: Buffer.start(
                host.system,
                self._role("buffer", host),
                config=self.config,
                prompts=self._prompts,
                ledger=self.ledger,
                payloads=self._payloads(),
            ),
        )
        self.buffer = Buffer.last
        self.buffer.hears = self.buffer_says

    def _payloads(self) -> WorldPayloads | None:
        if self.disk is None or self._payload_s is None:
            return None
        seed = self._seed + self.network.loop.now  # another one for each life
        return WorldPayloads(self.disk.root / "payloads", f"{seed}", self._payload_s)

    def start_trainer(self, name: str) -> Trainer:
        """Start a trainer; an older one of that name can no longer be reached, and lives on."""
        start = None if self.checkpoints is None else self.checkpoints.start()
        last = self.trainers[-1].actor if self.trainers else None
        robbed = start is None and last is not None and last._checkpointing.newest is not None
        for older in self.trainers:
            older.killed |= older.end.reason == KILLED
        step_s = self.delays.step_s
        backend = RecordingBackend(
            size=PART,
            seed=self._seed + len(self.trainers),
            forward_backward_s=step_s * 0.8,
            optimizer_s=step_s * 0.2,
        )
        output = Output()

        def read() -> Weights:
            return backend.weights

        source = Source(read, self.delays.move_s / NUM_PARTS / 4)
        snapshot = HeldSnapshot(source) if self.config.weights.snapshot else None
        host, ref, end = self._start(
            name,
            lambda host: SeenTrainer.start(
                host.system,
                self._role("trainer", host),
                config=self.config,
                backend=backend,
                sender=RecordingSender(
                    self.wire,
                    self.weights_config,
                    snapshot or source,
                    snapshot.weights if snapshot else read,
                ),
                snapshot=snapshot,
                batch_filter=Marks() if self.config.buffer.batch_filter else None,
                output=output,
                warm_start_prompts=[],
                checkpoints=self.checkpoints,
                start=start,
            ),
        )
        trainer = Trainer(
            name, host, backend, output, end, ref, SeenTrainer.last, self.network.loop.now
        )
        trainer.robbed = robbed
        if self.checkpoints is not None and start is not None:
            trainer.start, trainer.parent = start, self.checkpoints.wrote(start)
        self.trainers.append(trainer)
        self.begun.set()
        return trainer

    def launch(self, *names: str) -> None:
        """Start a launcher with these workers, perhaps beside one that has them already."""
        whose: Literal["run", "workers"] = "workers"
        if self._launchers == "one" and not self.launchers:
            whose = "run"
        name = f"launcher-{len(self.launchers)}"
        launcher = Launcher(
            self.network, name, names, config=self.config, start=self._start_worker, whose=whose
        )
        self.launchers.append(launcher)

    def _start_worker(self, name: str) -> Worker:
        engine = AbortingEngine(
            lambda: self._strikes(self.trouble.abort),
            delay_s=self._delay,
            stop_after=stop_after(self.num_turns),
            size=PART * NUM_PARTS,
        )
        if name in self.workers:  # what the device held is still there, and is no version's
            engine._weights = self.workers[name].engine.weights
        sink = Sink(engine, self.wire, self.delays.load_s, adopts=self._seed % 3 == 0)
        receiver = SeenReceiver(self.wire, self.weights_config, sink)
        host, ref, end = self._start(
            name,
            lambda host: RolloutActor.start(
                host.system,
                self._role("evaluator" if name.startswith("evaluator") else "rollout", host),
                config=self.config,
                engine=engine,
                receiver=receiver,
                scorer=Scorer(lambda: self._strikes(self.trouble.reward), self.num_turns),
                eval_prompts=self.eval_prompts,
            ),
        )
        worker = self.workers[name] = Worker(
            name, host.incarnation, host, engine, end, ref, receiver, self.network.loop.now
        )
        self.lives.append(worker)
        return worker

    @property
    def lost_workers(self) -> list[tuple[str, str]]:
        """(name, reason) of workers that ended on their own, and were not killed."""
        ended = [worker for worker in self.lives if worker.end.event.is_set()]
        return [(w.name, w.end.reason) for w in ended if w.end.reason not in {KILLED, ORDERLY}]

    @property
    def leader(self) -> Trainer:
        """The trainer with the highest term of those that were not killed and not fenced.

        It need not be the last one that was started: one that was stopped before it had registered
        comes later than its successor.
        """
        candidates = [trainer for trainer in self.trainers[::-1] if not trainer.killed]
        fit = [
            trainer
            for trainer in candidates
            if not any(word in trainer.end.reason for word in ("StaleTerm", "taken the name"))
        ]
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
    def has_ended(self) -> bool:
        """The leader has ended, and nobody starts it again."""
        leader = self.leader
        if not leader.end.event.is_set():
            return False
        again = any(each.goes_on and leader in each.lives for each in self.trainer_launchers)
        again |= (
            self.standby is not None
            and self.standby.watches
            and self.store.newest_live() is not None
        )
        return not again or leader.end.reason == ORDERLY

    @property
    def every_launcher(self) -> list[Launcher]:
        """Those of the workers, and those of trainers if any."""
        return self.launchers + self.trainer_launchers

    @property
    def told_of_end(self) -> bool:
        """The buffer has heard from some life of the registry that the run is over. A later life
        does not know, and whom the earlier one did not reach goes on for as long as it may.
        """
        return self.ends[BUFFER].host.system.run_ended is not None

    @property
    def over(self) -> bool:
        """The registry has told everyone that the run is over, and is gone."""
        registry = self.network.hosts[REGISTRY]
        return registry.system.run_ended is not None and not registry.lives

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
            turns = turns_of(rollout)
            for span in rollout.spans:
                weights = self.wire.sent[span.version]
                for position in range(span.start, span.end):
                    turn, start = turns[position]
                    if turn is None:
                        continue  # what the environment said
                    context, seed = prompt + tokens[:start], turn_seed(rollout.seed, turn)
                    expected, _ = fake_token(weights, context, seed, position - start)
                    assert tokens[position] == expected, (group.group_id, span)
                    count += 1
        return count

    def _delay(self, prompt_ids: Sequence[int], params: SamplingParams) -> float:
        if self._strikes(self.trouble.generation):
            raise GenerationFailed("the engine has a bad day")
        if self._strikes(self.trouble.hang):
            return 1e7
        # heavy tail: some completions take many times the median
        times = min(self._delays.paretovariate(1.5), 8.0)
        return self.delays.token_s * params.max_tokens / self.num_turns * times

    def _strikes(self, share: float) -> bool:
        return share > 0 and self._delays.random() < share

    def _observe(self, sender: str, receiver: str, message: Message) -> None:
        if isinstance(message, BatchReady):
            self.batches.append(message)

    def _start(
        self, name: str, start: Callable[[Host], LocalRef]
    ) -> tuple[Host, LocalRef, ProcessEnd]:
        """Begin the life of a process, and of its actor in it."""
        host = self.network.start(name, self.config.runtime.ask_timeout_s)
        self.logs[name] = host.log
        ref = host.process.call(start, host)
        end = self.ends[name] = ProcessEnd(self.network, host)
        ref.watch(end)
        return host, ref, end

    def crash(self, name: str, *, power: bool) -> None:
        """Kill a process, and look at what it has left on the disk."""
        self.kill(name)
        if self.disk is None:
            return
        versions = self.disk.image(self.disk.versions, synced=not power or synced(self.store))
        ledger = self.disk.image(self.disk.ledger, synced=not power or synced(self.ledger))
        for look in self.crashes:
            look(Crash(name, power, versions, ledger))

    async def revive(self, name: str, *, power: bool, after_s: float) -> None:
        """Kill the registry or the buffer, and start it again from what it has left on the disk."""
        if not self.network.alive(name) or self.disk is None:
            return
        self.reviving.add(name)
        self.crash(name, power=power)  # which looks at images of its own
        if name == REGISTRY:
            lost = power and not synced(self.store)
            self.disk.versions = self.disk.image(self.disk.versions, synced=not lost)
        else:
            lost = power and not synced(self.ledger)
            self.disk.ledger = self.disk.image(self.disk.ledger, synced=not lost)
        await asyncio.sleep(after_s)
        if not self.network.loop.ending:
            if name == REGISTRY:
                self.store = KeptVersions.open(self.disk.versions)
                self._start_registry()
            else:
                self.ledger = KeptLedger.open(self.disk.ledger)
                self._start_buffer()
        self.reviving.discard(name)

    def kill(self, name: str) -> None:
        """SIGKILL the newest process of that name."""
        if self.network.alive(name):
            self.ends[name].kill()

    @staticmethod
    def _role(kind: Any, host: Host) -> RoleInfo:
        return RoleInfo(kind, host.name, host.incarnation, str(host.address))
