"""Evaluation of one version on held-out prompts, spread over the engines that hold it.

Consumes the engines' replies to `EvaluatePolicy`, produces one `Evaluation`; waits for each engine
until `eval.timeout_s`. Every engine checks that each token came from the version asked for, so a
result belongs to one version or does not exist. A failed prompt is counted apart, never as a zero.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import NamedTuple

from ratchet.actors.transfer import AskFunction
from ratchet.config import EvalConfig
from ratchet.errors import RatchetError
from ratchet.messages import EvaluatePolicy, PolicyEvaluated
from ratchet.observability.logs import Log
from ratchet.transport.mailbox.base import Directory
from ratchet.types import PolicyVersion


class Evaluation(NamedTuple):
    """The mean reward of one version on held-out prompts."""

    version: PolicyVersion
    accuracy: float
    """mean reward over the prompts that could be scored"""
    num_prompts: int
    """prompts that were scored"""
    num_failed: int


async def evaluate(
    version: PolicyVersion,
    engines: Sequence[str],
    *,
    num_prompts: int,
    config: EvalConfig,
    directory: Directory,
    ask: AskFunction,
    log: Log,
) -> Evaluation | None:
    """Score the first `num_prompts` held-out prompts; None if no engine could."""
    share = math.ceil(num_prompts / max(1, len(engines)))
    requests = [
        EvaluatePolicy(
            version,
            first=first,
            count=min(share, num_prompts - first),
            samples=config.samples,
            temperature=config.temperature,
        )
        for first in range(0, num_prompts, share)
    ]
    replies = await asyncio.gather(
        *(
            ask(directory.ref(engine), request, timeout=config.timeout_s)
            for engine, request in zip(engines, requests, strict=False)
        ),
        return_exceptions=True,
    )
    rewards: list[float] = []
    for engine, reply in zip(engines, replies, strict=False):
        if isinstance(reply, PolicyEvaluated):
            rewards += [reward for reward in reply.rewards if reward is not None]
        elif isinstance(reply, RatchetError):
            log.warning("evaluation_failed", engine=engine, version=version, detail=str(reply))
        else:
            raise reply
    if not rewards:
        return None
    return Evaluation(
        version, math.fsum(rewards) / len(rewards), len(rewards), num_prompts - len(rewards)
    )
