"""The composition root: from a configuration to a running actor with everything it needs.

Consumes a `Config`, a run directory and a `System`; produces one actor per call. The only place
that knows concrete backends, transports and stores together. Heavy imports happen inside the
functions, so that a registry or a buffer process never loads torch.
"""

from __future__ import annotations

import ipaddress
import itertools
from collections.abc import Collection
from typing import Final

from ratchet.actors.actor import LocalRef
from ratchet.actors.buffer import BufferActor
from ratchet.actors.role import BUFFER, REGISTRY, TRAINER, evaluator_name, rollout_name
from ratchet.actors.rollout import RolloutActor
from ratchet.actors.system import System
from ratchet.actors.trainer import TrainerActor
from ratchet.actors.version_registry import VersionRegistry
from ratchet.config import Config
from ratchet.errors import ConfigError
from ratchet.imports import import_chosen
from ratchet.observability.own_calls import OwnCalls
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.batch_filter import open_batch_filter
from ratchet.runtime.checkpoint_store import RunCheckpoints
from ratchet.runtime.output import RunOutput
from ratchet.runtime.scoring import open_scorer
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.payloads import Payloads
from ratchet.storage.versions import VersionStore
from ratchet.tasks.base import Task
from ratchet.types import Prompt, RoleInfo, RoleKind

ENGINES: Final = {
    "sglang": "ratchet.backends.rollout.sglang.engine:create_engine",
    "torch": "ratchet.backends.rollout.torch:create_engine",
}
"""`rollout.backend` -> factory (config, base model directory) -> RolloutEngine."""

TRAINERS: Final = {"fsdp": "ratchet.backends.training.fsdp:create_backend"}
"""`trainer.backend` -> factory (config, base model directory) -> TrainingBackend."""


def role_names(config: Config) -> list[tuple[RoleKind, str]]:
    """Return kind and name of every role of a run, in the order of their start."""
    rollouts: list[tuple[RoleKind, str]] = [
        ("rollout", rollout_name(rank)) for rank in range(config.rollout.num_workers)
    ]
    evaluators: list[tuple[RoleKind, str]] = [
        ("evaluator", evaluator_name(rank)) for rank in range(config.num_evaluators)
    ]
    three: list[tuple[RoleKind, str]] = [
        ("registry", REGISTRY), ("buffer", BUFFER), ("trainer", TRAINER),
    ]  # fmt: skip
    return [*three, *rollouts, *evaluators]


def chosen_roles(
    config: Config, kinds: Collection[RoleKind] | None, *, in_process: bool
) -> tuple[tuple[RoleKind, str], ...]:
    """Return the roles of the kinds that are wanted; all of them for None.

    Raises:
        ConfigError: if they cannot be started on their own.
    """
    everything = tuple(role_names(config))
    if kinds is None:
        return everything
    known = {kind for kind, _ in everything}
    if in_process or REGISTRY not in kinds or not known.issuperset(kinds):
        msg = (
            f"roles = {sorted(kinds)} cannot be started: give some of {sorted(known)}, the registry"
            " among them, without in_process"
        )
        raise ConfigError(msg)
    return tuple(role for role in everything if role[0] in kinds)


def warm_start_prompts(config: Config, task: Task) -> list[Prompt]:
    """Return the training prompts whose references a warm start trains on; none without one."""
    num_examples = config.warm_start.steps * config.warm_start.batch_size
    return list(itertools.islice(task.prompts("train"), num_examples))


def start_role(
    system: System,
    role: RoleInfo,
    *,
    config: Config,
    run: RunDirectory,
    run_id: str,
    task: Task,
    in_process: bool = False,
    start_step: int | None = None,
) -> LocalRef:
    """Start the actor of a role on the running loop; `in_process` if all of the run is on it. A
    trainer goes on from the newest checkpoint, or from that of `start_step`.

    Raises:
        UserError: if something that the configuration names does not load.
    """
    match role.kind:
        case "registry":
            store = VersionStore.open(run.versions, run=run_id)
            return VersionRegistry.start(
                system,
                role.name,
                store=store,
                run_name=config.name,
                config=config.to_toml(),
                suspect_s=config.runtime.suspect_s,
                trainer_wait_s=config.runtime.trainer_wait_s,
            )
        case "buffer":
            return BufferActor.start(
                system,
                role,
                config=config,
                prompts=task.prompts("train"),
                ledger=GroupLedger.open(run.ledger, run=run_id),
                payloads=Payloads(run.payloads) if config.buffer.keep_payloads else None,
                own_calls=OwnCalls(system.log),
            )
        case "rollout" | "evaluator":
            return _start_rollout(system, role, config, run, task, in_process=in_process)
        case "trainer":
            return _start_trainer(system, role, config, run, run_id, task, start_step)
        case "producer":
            raise ValueError("a producer is its user's own program, and started by that")
        case "standby":
            raise ValueError("a standby is its launcher's own, and started by that")


def _start_rollout(
    system: System,
    role: RoleInfo,
    config: Config,
    run: RunDirectory,
    task: Task,
    *,
    in_process: bool,
) -> LocalRef:
    from ratchet.backends.rollout.base import ServedEngine
    from ratchet.runtime.base_model import ensure_base_model
    from ratchet.transport.weights.registry import open_receiver

    create = import_chosen("rollout.backend", config.rollout.backend, ENGINES)
    engine = create(config, ensure_base_model(config, run.base))
    if isinstance(engine, ServedEngine):
        engine.log_to(run.logs / f"{role.name}-engine.log")
    return RolloutActor.start(
        system,
        role,
        config=config,
        engine=engine,
        receiver=open_receiver(config.effective_weights),
        scorer=open_scorer(config, task, in_process=in_process, log=system.log),
        eval_prompts=task.prompts("eval")[: config.eval.num_prompts],
    )


def _start_trainer(
    system: System,
    role: RoleInfo,
    config: Config,
    run: RunDirectory,
    run_id: str,
    task: Task,
    start_step: int | None,
) -> LocalRef:
    from ratchet.backends.training.snapshot import Snapshot
    from ratchet.runtime.base_model import ensure_base_model
    from ratchet.transport.weights.registry import open_sender

    host = config.runtime.host
    if not ipaddress.ip_address(host).is_loopback:
        system.log.warning(
            "weights_not_encrypted",
            host=host,
            detail="gloo and NCCL neither authenticate nor encrypt: keep strangers off the network",
        )
    create = import_chosen("trainer.backend", config.trainer.backend, TRAINERS)
    backend = create(config, ensure_base_model(config, run.base))
    snapshot = Snapshot(backend) if config.weights.snapshot else None
    checkpoints = RunCheckpoints(run, run_id, config, system.log)
    return TrainerActor.start(
        system,
        role,
        config=config,
        backend=backend,
        sender=open_sender(config.effective_weights, host, snapshot or backend),
        output=RunOutput(run),
        warm_start_prompts=warm_start_prompts(config, task),
        snapshot=snapshot,
        batch_filter=open_batch_filter(config.buffer),
        checkpoints=checkpoints,
        start=checkpoints.start(start_step),
    )
