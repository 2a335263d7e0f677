"""One simulated run: the four actors as they are, fakes around them, and what was seen of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tests.simulation.batch_marks import Marks
from tests.simulation.disk import synced
from tests.simulation.fabric import Fabric
from tests.simulation.fakes import AbortingEngine, Output, RecordingBackend, Scorer
from tests.simulation.launcher import KILLED, Launcher
from tests.simulation.lives import Crash, Delays, Links, Trainer, Trouble, Worker
from tests.simulation.loop import VirtualLoop
from tests.simulation.payloads import WorldPayloads
from tests.simulation.rollout_draws import draw_turns, stop_after
from tests.simulation.seen import Buffer, KeptLedger, KeptVersions, ProcessEnd, SeenTrainer
from tests.simulation.sessions import Host, Network
from tests.simulation.standby import Standby
from tests.simulation.weight_ends import (
    NUM_PARTS,
    PART,
    HeldSnapshot,
    RecordingSender,
    SeenReceiver,
    Sink,
    Source,
    Weights,
    in_memory,
)

from ratchet.actors.ref import LocalRef
from ratchet.actors.role import BUFFER, ORDERLY, REGISTRY, TRAINER, evaluator_name, rollout_name
from ratchet.actors.rollout import RolloutActor
from ratchet.actors.version_registry import VersionRegistry
from ratchet.backends.rollout.base import SamplingParams
from ratchet.config import Config
from ratchet.errors import GenerationFailed
from ratchet.messages import (
    BatchReady,
    Message,
)
from ratchet.types import Prompt, RoleInfo

if TYPE_CHECKING:
    from tests.helpers.actors import RecordingLog
    from tests.simulation.disk import Disk
    from tests.simulation.trainers import WorldCheckpoints


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
