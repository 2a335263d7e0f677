"""What a trainer is made of, and how its parts are joined; a composition without rules of its own.

Consumes an actor and what it was given from outside; produces the parts, which take from it what
they need: a clock, a log, its asks, timers and child tasks. Waits for nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from ratchet.actors.batch_requests import BatchRequests
from ratchet.actors.checkpointing import Checkpointing, CheckpointStore
from ratchet.actors.evaluation import evaluate
from ratchet.actors.evaluations import Evaluations
from ratchet.actors.judgement import BatchFilter
from ratchet.actors.optimisation import Optimisation
from ratchet.actors.publisher import Publisher, WeightSnapshot
from ratchet.actors.role import BUFFER, RoleActor
from ratchet.actors.step_metrics import StepMetrics, TrainerOutput
from ratchet.actors.transfer import Ends, Transfers
from ratchet.actors.weight_sync import SyncEngine, WeightSync
from ratchet.backends.training.base import TrainingBackend
from ratchet.config import Config
from ratchet.transport.weights.base import WeightSender


class TrainerParts(NamedTuple):
    """Each owns a fact of training."""

    metrics: StepMetrics
    publisher: Publisher
    sync: WeightSync
    evaluations: Evaluations
    requests: BatchRequests
    optimisation: Optimisation
    checkpointing: Checkpointing


def trainer_parts(
    actor: RoleActor[Any],
    config: Config,
    *,
    backend: TrainingBackend,
    sender: WeightSender,
    output: TrainerOutput,
    snapshot: WeightSnapshot | None,
    batch_filter: BatchFilter | None,
    checkpoints: CheckpointStore | None,
) -> TrainerParts:
    """Make the parts of a trainer."""
    system, log, now = actor.system, actor.log, actor.now
    metrics = StepMetrics(now)
    ends: Ends = {"directory": system, "ask": actor.ask, "now": now, "log": log}
    publisher = Publisher(
        Transfers(sender=sender, timeout_s=config.weights.timeout_s, **ends),
        **ends,
        snapshot=snapshot,
        probe=backend.probe if config.needs_probe else None,
    )
    sync = WeightSync(
        publisher,
        spawn=actor.spawn,
        after=actor.after,
        wait_for=actor.wait_for,
        patience_s=config.trainer.batch_timeout_s,
        metrics=metrics,
    )
    evaluations = Evaluations(
        config,
        publisher=publisher,
        evaluate=partial(evaluate, config=config.eval, directory=system, ask=actor.ask, log=log),
        spawn=actor.spawn,
        now=now,
        log=log,
        write=output.evaluation,
        released=lambda engine: actor.actor_ref.tell(SyncEngine(engine)),
    )
    requests = BatchRequests(
        actor.name,
        publisher=publisher,
        buffer=lambda: system.ref(BUFFER),
        life=lambda: actor.life_of(BUFFER),
        after=actor.after,
        repeat_s=system.ask_timeout_s,
        log=log,
    )
    optimisation = Optimisation(
        config,
        backend=backend,
        publisher=publisher,
        sync=sync,
        batch_filter=batch_filter,
        wait_for=actor.wait_for,
        log=log,
    )
    checkpointing = Checkpointing(
        checkpoints,
        every_steps=config.checkpoint.every_steps,
        backend=backend,
        publisher=publisher,
        account=lambda: requests.done,
        announce=lambda written: system.ref(BUFFER).tell(written),
        spawn=actor.spawn,
        now=now,
        log=log,
    )
    return TrainerParts(
        metrics, publisher, sync, evaluations, requests, optimisation, checkpointing
    )
