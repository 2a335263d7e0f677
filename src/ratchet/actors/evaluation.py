"""Evaluation of one version on held-out prompts, spread over the engines that hold it.

Consumes the engines' replies to `EvaluatePolicy`, produces one `Evaluation`; waits for each engine
until `eval.timeout_s` and a little more. Every engine checks that each token came from the version
asked for, so a result belongs to one version or does not exist. A failed prompt is counted apart,
never as a zero.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, NamedTuple

from ratchet.actors.transfer import AskFunction
from ratchet.config import EvalConfig
from ratchet.errors import RatchetError
from ratchet.messages import EvaluatePolicy, PolicyEvaluated
from ratchet.observability.logs import Log
from ratchet.transport.mailbox.base import Directory
from ratchet.types import PolicyVersion, RoleInfo

REPLY_S: Final = 5.0
"""An engine's reply may come this much later than `eval.timeout_s`: it has what was scored."""


class TaskEvaluation(NamedTuple):
    """The mean reward on the prompts of one task, of several."""

    accuracy: float
    num_prompts: int
    """prompts that were scored"""


class Evaluation(NamedTuple):
    """The mean reward of one version on held-out prompts."""

    version: PolicyVersion
    accuracy: float | None
    """mean reward over the prompts that could be scored; None if none could"""
    num_prompts: int
    """prompts that were scored"""
    num_failed: int
    tasks: Mapping[str, TaskEvaluation] = {}
    """of several tasks, each by its label"""

    def line(self) -> dict[str, Any]:
        """Return it as plain data; `tasks` only where there are several."""
        line = self._asdict()
        tasks = line.pop("tasks")
        return line | ({"tasks": {k: v._asdict() for k, v in tasks.items()}} if tasks else {})


def _ignore(_: RoleInfo) -> None:
    pass


async def evaluate(
    version: PolicyVersion,
    engines: Sequence[RoleInfo],
    *,
    config: EvalConfig,
    directory: Directory,
    ask: AskFunction,
    log: Log,
    ended: Callable[[RoleInfo], None] = _ignore,
) -> Evaluation:
    """Score the first `eval.num_prompts` held-out prompts.

    Args:
        version: what the engines hold.
        engines: each gets a share of the prompts.
        config: how.
        directory: where the engines are found.
        ask: asks them.
        log: told of an engine that fails; its prompts count as failed.
        ended: called as each engine is done, or given up: it may take another version.
    """
    num_prompts = config.num_prompts
    share = math.ceil(num_prompts / max(1, len(engines)))

    async def ask_share(index: int, engine: RoleInfo) -> PolicyEvaluated | None:
        first = index * share
        count = min(share, num_prompts - first)
        request = EvaluatePolicy(version, first, count, config.samples, config.temperature)
        try:
            if count <= 0:
                return None
            return await ask(
                directory.ref(engine.name), request, timeout=config.timeout_s + REPLY_S
            )
        finally:
            ended(engine)

    replies = await asyncio.gather(
        *(ask_share(index, engine) for index, engine in enumerate(engines)), return_exceptions=True
    )
    done: list[PolicyEvaluated] = []
    for engine, reply in zip(engines, replies, strict=True):
        if isinstance(reply, PolicyEvaluated):
            done.append(reply)
        elif isinstance(reply, RatchetError):
            log.warning("evaluation_failed", engine=engine.name, version=version, detail=str(reply))
        elif reply is not None:
            raise reply
    return evaluation_of(version, done, num_prompts)


def evaluation_of(
    version: PolicyVersion, replies: Iterable[PolicyEvaluated], num_prompts: int
) -> Evaluation:
    """Sum replies up; of `num_prompts` those without a reward have failed."""
    rewards: list[float] = []
    by_task: defaultdict[str, list[float]] = defaultdict(list)
    for reply in replies:
        for index, reward in enumerate(reply.rewards):
            if reward is not None:
                rewards.append(reward)
                if reply.tasks:
                    by_task[reply.tasks[index]].append(reward)
    accuracy = fmean(rewards) if rewards else None
    tasks = {task: TaskEvaluation(fmean(by_task[task]), len(by_task[task])) for task in by_task}
    return Evaluation(version, accuracy, len(rewards), num_prompts - len(rewards), tasks)
