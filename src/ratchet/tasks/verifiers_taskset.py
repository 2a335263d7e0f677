"""One taskset of the verifiers library (its API from 0.4 on), without its agents and sandboxes.

Consumes the taskset's tasks and what the policy has said, produces prompts and the sum of a task's
weighted rewards; waits for the task's own code, on an event loop of the calling thread.

In the library a task is solved by an agent: a program in a sandbox that calls a model, with as many
turns as it likes. Here the policy answers once, and the task scores a trace that holds the prompt
and that answer, as the library scores a saved trace again. What needs more is refused.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

from ratchet.errors import RewardFailed, TaskError
from ratchet.tasks.base import Conversation, Split
from ratchet.tasks.verifiers_loop import Loops, signals_kept


def load_taskset(name: str, args: Mapping[str, Any], seed: int, *, needs_rewards: bool) -> Taskset:
    """Load an installed taskset, whose rewards need not be such that can be used here unless they
    score.

    Raises:
        TaskError: if it is not installed, does not load, or is of a kind that cannot be used.
    """
    where = f"task.args.environment = {name!r}"
    library = import_module("verifiers.v1")
    loaders = import_module("verifiers.v1.utils.loaders")
    try:
        with signals_kept():
            config = loaders.taskset_config_type(name).model_validate({**args, "id": name})
            taskset = loaders.load_taskset(config)
            agents = loaders.environment_class(name)
            own_harness = loaders.default_harness_id(name) == name
    except Exception as error:  # whatever its own code raises
        msg = f"{where} with task.args.args = {dict(args)}: {type(error).__name__}: {error}"
        raise TaskError(msg) from error
    task_type = type(taskset).task_type()
    refusals = {
        "brings an environment of its own, in which several agents may play": agents
        is not library.SingleAgentEnv,
        "brings an agent of its own": own_harness,
        "needs a container": task_type.NEEDS_CONTAINER,
        "prepares a sandbox (`setup` or `finalize`)": task_type.setup is not library.Task.setup
        or task_type.finalize is not library.Task.finalize,
        "has tools": bool(type(taskset).toolsets(config) or task_type.toolsets(config.task)),
        "has no end": not taskset.bounded,
    }
    if found := [what for what, is_so in refusals.items() if is_so]:
        msg = (
            f"{where} {', '.join(found)}: the policy here answers a prompt once, in text; use a"
            " taskset that needs nothing else, or a task of your own"
        )
        raise TaskError(msg)
    return Taskset(library, taskset, where, seed, needs_rewards=needs_rewards)


class Taskset:
    """What a task needs of a taskset; implements `ProblemSource`."""

    max_turns = 1

    def __init__(
        self, library: Any, taskset: Any, where: str, seed: int, *, needs_rewards: bool
    ) -> None:
        self._library = library
        self._taskset = taskset
        self._where = where
        self._seed = seed
        self._needs_rewards = needs_rewards
        self._loops = Loops()

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]] | None:
        """Return the tasks; None for evaluation, as a taskset has one list of them.

        Raises:
            TaskError: if a task cannot be loaded, or has no reward that can be used here.
        """
        return self._rows if split == "train" else None

    def reply(self, row: Mapping[str, Any], conversation: Conversation) -> str | None:
        """Return None: a conversation is over after one turn."""

    def reward(self, row: Mapping[str, Any], conversation: Conversation) -> float:
        """Return the sum of the task's weighted rewards.

        Raises:
            RewardFailed: if one of them raised.
        """
        return self._loops.run(self._reward(row["task"], conversation))

    @cached_property
    def _rows(self) -> list[Mapping[str, Any]]:
        random.seed(self._seed)
        try:
            tasks = list(self._taskset)
        except Exception as error:  # whatever its own code raises
            msg = f"{self._where} does not load: {type(error).__name__}: {error}"
            raise TaskError(msg) from error
        if tasks and self._needs_rewards:
            self._check_rewards(tasks[0])  # all are of one type
        return [
            {"prompt": _plain(self._messages(t.data)), "answer": _answer(t.data), "task": t}
            for t in tasks
        ]

    def _check_rewards(self, task: Any) -> None:
        functions = [*task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
        unusable = [function.__name__ for function in functions if _needs_sandbox(function)]
        if unusable or not functions:
            msg = (
                f"{self._where} has no reward"
                if not functions
                else f"{self._where} scores in a sandbox ({', '.join(unusable)})"
            )
            raise TaskError(f"{msg}; use another taskset, or give task.reward")

    def _messages(self, data: Any) -> list[Any]:
        """Return the library's messages of a prompt; none for a task that has no prompt."""
        prompt = data.prompt or []
        if isinstance(prompt, str):
            prompt = [self._library.UserMessage(content=prompt)]
        if data.system_prompt is None:
            return list(prompt)
        return [self._library.SystemMessage(content=data.system_prompt), *prompt]

    async def _reward(self, task: Any, conversation: Conversation) -> float:
        trace = self._trace(task, conversation.turns[-1])
        try:
            await task.score(trace)
        except Exception as error:
            msg = f"the task raised {type(error).__name__}: {error}"
            raise RewardFailed(msg) from error
        return float(trace.reward)

    def _trace(self, task: Any, answer: str) -> Any:
        library = self._library
        state = import_module("verifiers.v1.state").state_cls(type(task))()
        trace = library.Trace(
            task=library.TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
            ),
            agent=library.AgentInfo(config=library.AgentConfig()),
            state=state,
        )
        said = library.AssistantMessage(content=answer)
        for index, message in enumerate((*self._messages(task.data), said)):
            parent = index - 1 if index else None
            trace.nodes.append(
                library.MessageNode(parent=parent, message=message, sampled=message is said)
            )
        trace.ok = trace.is_completed = True
        return trace


def _plain(messages: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"role": each.role, "content": each.content} for each in messages]


def _answer(data: Any) -> str | None:
    """Return the reference of a task that has a field for one."""
    answer = getattr(data, "answer", None)
    return answer if isinstance(answer, str) else None


def _needs_sandbox(function: Callable[..., Any]) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
