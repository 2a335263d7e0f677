"""The tree of a run: who supervises whom, and what the end of each role means.

Consumes children, one per role that is placed here, and what the roles say at their end; produces
the supervisor of them all and one outcome. Waits for that supervisor, or to be told to stop.

    root: one_for_all, no restarts      until the trainer ends in order; where it is not placed
      directory: as runtime.* says      here, until the registry does; without both, until all do
        registry                            goes on from versions.sqlite
      groups: as runtime.* says
        buffer                              goes on from ledger.sqlite
      training: as runtime.* says
        trainer-0                           goes on from its newest checkpoint
      workers: as runtime.* says
        rollout-0, rollout-1 ...
      evaluators: as runtime.* says         when they end too often the run goes on without them
        evaluator-0 ...

Whoever dies is started again, alone, and the others wait for it. A trainer or a buffer that says
itself why the run cannot go on (`RunFailed`) ends it, and a trainer that another has replaced ends
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from ratchet.actors.restarts import End, EndKind, Escalate, Rules
from ratchet.actors.role import LOST
from ratchet.actors.supervisor import GRACE_S, Child, Member, Supervisor
from ratchet.config import Config
from ratchet.observability.logs import Log
from ratchet.runtime.role import RoleOutcome
from ratchet.types import RoleKind

STOP_S: Final[dict[RoleKind, float]] = {
    "rollout": 3.0,
    "evaluator": 3.0,
    "trainer": 3.5,
    "buffer": 1.5,
    "registry": 1.0,
    "producer": 3.0,
    "standby": 1.0,
}
"""Seconds that each may take to stop, before it is killed: one after the other, from the workers
(side by side) to the registry, all are gone within ten."""

DIRECTORY: Final = "directory"
GROUPS: Final = "groups"
TRAINING: Final = "training"
WORKERS: Final = "workers"
EVALUATORS: Final = "evaluators"

_OF_OTHERS: Final = frozenset(("RunFailed", "ActorDead", "AskTimeout", "TransferFailed"))
"""Errors of a role that has lost another one, or waited for it in vain. Some are its own fault;
they lose nothing but the short time in which a better cause may be heard."""

OnEscalation = Callable[[str], Awaitable[None]]


@dataclass(frozen=True)
class RoleEnd(End):
    """The end of a role, with its last words."""

    outcome: RoleOutcome = field(kw_only=True)


def role_end(name: str, outcome: RoleOutcome) -> RoleEnd:
    """Judge what a role said at its end, if it was not its supervisor that stopped it.

    A role that was stopped by somebody else's signal, while the run goes on, is missed like one
    that failed. It is a consequence: if the same signal is meant for the launcher too (a batch
    system tells all processes of a job), the launcher hears of it in the grace, and it is no
    failure.
    """
    detail = outcome.detail
    match outcome.status:
        case "finished":
            return RoleEnd(name, "normal", detail, outcome=outcome)
        case "run_failed" | "user_error":
            return RoleEnd(name, "fatal", detail, outcome=outcome)
        case "stopped":
            reason = f"{name} was stopped from outside"
            return RoleEnd(name, "consequence", reason, outcome=outcome)
        case _:
            return _failure(name, outcome)


def _failure(name: str, outcome: RoleOutcome) -> RoleEnd:
    error, _, text = outcome.detail.partition(": ")
    kind: EndKind = "consequence" if error in _OF_OTHERS else "abnormal"
    reason = text if error == "RunFailed" else outcome.detail
    if not reason.startswith(name):
        reason = f"{name}: {reason}"
    return RoleEnd(name, kind, reason, outcome=outcome)


class _Judge:
    """Implements `Child`: a role whose own word that the run cannot go on is the last one."""

    def __init__(self, child: Child) -> None:
        self.name = child.name
        self.start, self.stop, self.kill = child.start, child.stop, child.kill
        self._child = child

    async def ended(self) -> End:
        end = await self._child.ended()
        if not isinstance(end, RoleEnd) or not is_last_word(end.outcome):
            return end
        await asyncio.sleep(GRACE_S)  # it may be the consequence of an end that is told by then
        outcome = RoleOutcome("failed", end.reason)
        return RoleEnd(end.who, "fatal", end.reason, outcome=outcome)


def is_last_word(outcome: RoleOutcome) -> bool:
    """Return whether a role says itself that the run cannot go on."""
    failed = outcome.status == "failed" and outcome.detail.startswith("RunFailed: ")
    return failed and LOST not in outcome.detail


def build_tree(
    children: Sequence[tuple[RoleKind, Child]],
    config: Config,
    *,
    log: Log,
    on_escalation: OnEscalation | None = None,
) -> Supervisor:
    """Return the supervisor of the roles that are placed here, in the order of their start.

    Args:
        children: kind and child of each role.
        config: its `runtime` holds the rules for the trainer and for the workers.
        log: of the launcher.
        on_escalation: told the cause before the roles are stopped; unless it came from the
            registry, or the run goes on with another in the place of a role here.
    """
    # the registry outlives the trainer of another launcher until all roles have heard of the end
    placed = {kind for kind, _ in children}
    leader = next((kind for kind in ("trainer", "registry") if kind in placed), None)
    members = []
    keepers_of: tuple[tuple[str, RoleKind], ...] = ((DIRECTORY, "registry"), (GROUPS, "buffer"))
    for name, kind in keepers_of:
        keepers = [_Judge(child) for of, child in children if of == kind]
        if keepers:
            keeper = _workers(name, keepers, config, log, STOP_S[kind])
            members.append(Member(keeper, significant=leader in {kind, None}))
    trainers = [child for kind, child in children if kind == "trainer"]
    if trainers:
        guided = [_Judge(child) for child in trainers]
        training = _workers(TRAINING, guided, config, log, STOP_S["trainer"])
        members.append(Member(training, significant=True))
    rollouts = [child for kind, child in children if kind == "rollout"]
    if rollouts:
        workers = _workers(WORKERS, rollouts, config, log)
        members.append(Member(workers, significant=leader is None))
    evaluators = [child for kind, child in children if kind == "evaluator"]
    if evaluators:
        only = leader is None and not rollouts
        workers = _workers(EVALUATORS, evaluators, config, log)
        members.append(Member(workers, "transient" if only else "temporary", significant=only))

    async def escalated(verdict: Escalate) -> None:
        cause = _outcome(verdict.first)
        is_news = cause.status != "run_failed" and not cause.replaced
        if on_escalation is not None and is_news:
            await on_escalation(cause.detail)

    rules = Rules("one_for_all", max_restarts=0, until="all" if leader is None else "any")
    return Supervisor("root", members, rules, log=log, on_escalation=escalated)


def _workers(
    name: str,
    workers: Sequence[Child],
    config: Config,
    log: Log,
    stop_s: float = STOP_S["rollout"],
) -> Supervisor:
    runtime = config.runtime
    rules = Rules(
        runtime.restart_strategy,
        max_restarts=runtime.max_restarts,
        window_s=runtime.restart_window_s,
        backoff_first_s=runtime.backoff_first_s,
        backoff_most_s=runtime.backoff_most_s,
        until="all",
    )
    members = [Member(child, significant=True, stop_s=stop_s) for child in workers]
    return Supervisor(name, members, rules, log=log, stops_together=True)


async def run_tree(
    root: Supervisor, *, stop: asyncio.Event, kill: asyncio.Event, stop_training: Callable[[], bool]
) -> RoleOutcome:
    """Run to the end.

    Args:
        root: not started yet.
        stop: ends training in order.
        kill: ends all at once, that is within ten seconds.
        stop_training: tells the trainer to stop; False if there is none here, and then all that is
            here is stopped.
    """
    await root.start()
    end = asyncio.create_task(root.ended())
    killed = asyncio.create_task(_stop_on(kill, root))
    stopped = asyncio.create_task(_stop_on(stop, root, unless=stop_training))
    try:
        return _outcome(await end)
    finally:
        for task in (end, killed, stopped):
            task.cancel()
        await _leave(root)


async def _stop_on(
    event: asyncio.Event, root: Supervisor, unless: Callable[[], bool] = lambda: False
) -> None:
    await event.wait()
    if not unless():
        await root.stop()


async def _leave(root: Supervisor) -> None:
    try:
        await root.stop()
    except asyncio.CancelledError:  # told twice: nobody waits for an order
        await root.kill()
        raise


def _outcome(end: End) -> RoleOutcome:
    if not isinstance(end, RoleEnd):
        return RoleOutcome("stopped", "interrupted") if end.kind == "normal" else _failed(end)
    return end.outcome if end.kind in {"normal", "fatal"} else _failed(end)


def _failed(end: End) -> RoleOutcome:
    return RoleOutcome("failed", end.reason)
