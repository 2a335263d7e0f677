"""One engine's share of an evaluation.

Consumes `EvaluatePolicy`, produces one mean reward per prompt, or None where there is none. Waits
for the engine and the scorer; `eval.timeout_s` ends that, and what is not scored then is None. An
offer of another version ends it at once, with no result: who holds an engine to its version is the
trainer, and an evaluation never keeps an engine from weights that are sent to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ratchet.actors.generation import Generator
from ratchet.errors import GenerationFailed, RewardFailed, VersionError
from ratchet.messages import EvaluatePolicy, PolicyEvaluated
from ratchet.observability.logs import Log
from ratchet.tasks.mixture import label_of
from ratchet.types import PolicyVersion, Prompt


class EvaluationShares:
    """The evaluations that one engine runs."""

    def __init__(
        self, generator: Generator, prompts: Sequence[Prompt], *, timeout_s: float | None, log: Log
    ) -> None:
        self._generator = generator
        self._prompts = prompts
        self._timeout_s = timeout_s
        self._log = log
        self._running: dict[asyncio.Timeout, PolicyVersion] = {}
        self._newest: PolicyVersion = -1

    @property
    def running(self) -> bool:
        """Whether the engine evaluates."""
        return bool(self._running)

    def supersede(self, version: PolicyVersion) -> None:
        """End those of other versions: the engine is about to take this one."""
        self._newest = version
        now = asyncio.get_running_loop().time()
        for end, evaluated in self._running.items():
            if evaluated != version and not end.expired():
                end.reschedule(now)

    async def run(self, message: EvaluatePolicy, held: PolicyVersion | None) -> PolicyEvaluated:
        """Score the prompts that were asked for.

        Raises:
            VersionError: if the engine holds another version, or is offered one meanwhile.
        """
        version = message.version
        if held != version:
            msg = f"the engine holds version {held}, not {version}"
            raise VersionError(msg)
        prompts = self._prompts[message.first : message.first + message.count]
        end = asyncio.timeout(None)
        self._running[end] = version
        try:
            async with end:
                rewards = await self._all(prompts, message)
        except TimeoutError:
            msg = f"version {self._newest} was sent while version {version} was evaluated"
            raise VersionError(msg) from None
        finally:
            del self._running[end]
        several = self._generator.config.task.tasks
        tasks = tuple(label_of(each.prompt_id) for each in prompts) if several else ()
        return PolicyEvaluated(version, rewards, tasks)

    async def _all(
        self, prompts: Sequence[Prompt], message: EvaluatePolicy
    ) -> tuple[float | None, ...]:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(prompt, message)) for prompt in prompts]
        except* VersionError as errors:
            raise errors.exceptions[0] from None
        return tuple(task.result() for task in tasks)

    async def _one(self, prompt: Prompt, message: EvaluatePolicy) -> float | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._generator.evaluate(prompt, message)
        except (GenerationFailed, RewardFailed) as error:
            detail = str(error)
        except TimeoutError:
            detail = f"not done within {self._timeout_s} s (eval.timeout_s)"
        self._log.warning("evaluation_failed", prompt=prompt.prompt_id, detail=detail)
        return None
