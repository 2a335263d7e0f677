"""One call of a task's own code, whatever that does with it.

Consumes a task, a prompt and an answer of the policy; produces a finite reward, the environment's
next step, or a `RewardFailed` whose `reason` says in which of its ways the code failed. Waits for
the code. It runs in a reward process, or in a thread of the worker.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from numbers import Real
from typing import TypeVar

from ratchet.errors import RewardFailed
from ratchet.tasks.base import Conversation, MultiTurnTask, Step, Task
from ratchet.types import Prompt

_MOST_CHARS = 2000

T = TypeVar("T")


def max_turns(task: Task, prompt: Prompt) -> int:
    """Return how many turns the policy has at most."""
    return task.max_turns(prompt) if isinstance(task, MultiTurnTask) else 1


def judge(task: Task, prompt: Prompt, answer: str | Conversation) -> float:
    """Return the reward of a completion, or of a conversation.

    Raises:
        RewardFailed: if the code raised, exited, ran out of memory, or returned what is not a
            finite number.
    """
    if isinstance(answer, str):
        return _number(_call(task.score, prompt, answer), prompt)
    return _number(_call(_environment(task).score_conversation, prompt, answer), prompt)


def take_step(task: Task, prompt: Prompt, conversation: Conversation) -> Step:
    """Return the environment's answer to the last turn.

    Raises:
        RewardFailed: as `judge`, or if it is not a `Step`.
    """
    step = _call(_environment(task).step, prompt, conversation)
    if not isinstance(step, Step):
        msg = f"the environment of prompt {prompt.prompt_id} returned {_shown(step)}, not a Step"
        raise RewardFailed(msg, "reward_invalid")
    return step


def _environment(task: Task) -> MultiTurnTask:
    if not isinstance(task, MultiTurnTask):
        msg = f"{task!r} is a task of one turn"
        raise TypeError(msg)
    return task


def _call(function: Callable[[Prompt, T], object], prompt: Prompt, argument: T) -> object:
    where = f"the reward of prompt {prompt.prompt_id}"
    try:
        return function(prompt, argument)
    except MemoryError as error:
        raise RewardFailed(f"{where} ran out of memory{_text(error)}", "reward_memory") from error
    except SystemExit as error:
        raise RewardFailed(f"{where} exited: SystemExit{_text(error)}", "reward_exited") from error
    except BaseException as error:  # what it raises is about this reward, not about the worker
        msg = f"{where} raised {type(error).__name__}{_text(error)}"
        raise RewardFailed(msg, "reward_raised") from error


def _number(reward: object, prompt: Prompt) -> float:
    where = f"the reward of prompt {prompt.prompt_id}"
    # a bool is a number to Python, and a usual reward; numpy's numbers are `Real` as well
    if not isinstance(reward, Real):
        raise RewardFailed(f"{where} is {_shown(reward)}, not a number", "reward_invalid")
    try:
        number = float(reward)
    except Exception as error:
        msg = f"{where} is too large for a float, or breaks when it is made one{_text(error)}"
        raise RewardFailed(msg, "reward_invalid") from error
    if not math.isfinite(number):
        raise RewardFailed(f"{where} is {number}, which is not finite", "reward_invalid")
    return number


def _shown(value: object) -> str:
    return reprlib.repr(value)  # short, and it takes a `__repr__` that raises


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception as broken:  # noqa: BLE001 - the user's `__str__`
        text = f"(and its text cannot be made: {type(broken).__name__})"
    return f": {text[:_MOST_CHARS]}" if text else ""
