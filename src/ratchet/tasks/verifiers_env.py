"""One environment of the verifiers library (its classic API, before 0.4), without a server.

Consumes rows of its data and what the policy has said, produces the environment's next message and
the rubric's reward. Waits for the environment's code, on an event loop of the calling thread.

The library runs a rollout from its beginning to its end, with a state of its own that holds
anything. A conversation here has to go on in any process, so each call plays it again from the
row, and what the environment says must be the same each time: `random` is seeded for that by the
conversation.
"""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from ratchet.errors import RewardFailed, TaskError
from ratchet.tasks.base import Conversation, Split
from ratchet.tasks.verifiers_loop import Loops, signals_kept

_raised: ContextVar[list[Exception]] = ContextVar("raised")
"""What the rubric's functions raised in the call at hand."""


def load_environment(
    name: str, args: Mapping[str, Any], seed: int, *, needs_rubric: bool
) -> Environment:
    """Load an installed environment, whose rubric need not be one that can be used here unless it
    scores.

    Raises:
        TaskError: if it is not installed, does not load, or is of a kind that cannot be used.
    """
    where = f"task.args.environment = {name!r}"
    library = import_module("verifiers")
    try:
        with signals_kept():
            environment = library.load_environment(name, **args)
    except Exception as error:  # whatever its own code raises
        msg = f"{where} with task.args.args = {dict(args)}: {type(error).__name__}: {error}"
        raise TaskError(msg) from error
    if not isinstance(environment, library.MultiTurnEnv):
        msg = f"{where} is a {type(environment).__name__}, not a SingleTurnEnv or MultiTurnEnv"
        raise TaskError(msg)
    if isinstance(environment, library.ToolEnv) or environment.tool_defs:
        msg = (
            f"{where} calls tools: its turns are parsed by a server for chat, and the policy here"
            " speaks text; use an environment whose turns are text"
        )
        raise TaskError(msg)
    if needs_rubric and environment.rubric.has_group_rewards:
        msg = (
            f"{where} rewards the completions of a group together, and a reward here is of one"
            " completion; use a rubric without functions of groups, or task.reward"
        )
        raise TaskError(msg)
    return Environment(library, environment, seed)


class Environment:
    """What a task needs of an environment; implements `ProblemSource`."""

    def __init__(self, library: Any, environment: Any, seed: int) -> None:
        self._library = library
        self._environment = environment
        self._seed = seed
        self._loops = Loops()
        self.max_turns: int = environment.max_turns
        """-1: no limit."""
        _watch(environment.rubric)

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]] | None:
        """Return the rows of a split; None if there is no data for it."""
        random.seed(self._seed)
        found: Sequence[Mapping[str, Any]] | None
        if split == "train":
            found = self._environment.build_dataset()
            return found if found is not None else self._environment.build_eval_dataset()
        if self._environment.build_dataset() is None:
            return None  # all there is, is trained on
        found = self._environment.build_eval_dataset()
        return found

    def reply(self, row: Mapping[str, Any], conversation: Conversation) -> str | None:
        """Return what the environment says next; None if the conversation is over.

        Raises:
            RewardFailed: if it does not say again what it has said.
        """
        return self._loops.run(self._reply(row, conversation))

    def reward(self, row: Mapping[str, Any], conversation: Conversation) -> float:
        """Return the rubric's reward of a conversation that is over.

        Raises:
            RewardFailed: if a function of the rubric raised, or as `reply`.
        """
        return self._loops.run(self._reward(row, conversation))

    async def _reply(self, row: Mapping[str, Any], conversation: Conversation) -> str | None:
        state = await self._play(row, conversation)
        try:
            if await self._environment.is_completed(state):
                return None
            heard = len(state["trajectory"][-1]["prompt"]) + 1
            messages = await self._environment.get_prompt_messages(state)
            over = state.get("final_env_response") is not None
            return None if over else _said(messages[heard:])
        finally:
            await self._environment.cleanup(state)

    async def _reward(self, row: Mapping[str, Any], conversation: Conversation) -> float:
        raised: list[Exception] = []
        _raised.set(raised)
        state = await self._play(row, conversation)
        await self._environment.is_completed(state)
        await self._environment.cleanup(state)  # makes the completion of the turns as well
        await self._environment.rubric.score_rollout(state)
        await self._environment.rubric.cleanup(state)
        if raised:
            msg = f"the rubric raised {type(raised[0]).__name__}: {raised[0]}"
            raise RewardFailed(msg) from raised[0]
        return float(state["reward"])

    async def _play(self, row: Mapping[str, Any], conversation: Conversation) -> Any:
        """Play the conversation up to its last turn, and return the library's state of it."""
        random.seed(conversation.seed)
        environment = self._environment
        state = await environment.init_state(dict(row), _no_client(self._library), "policy")
        state = await environment.setup_state(state) or state
        heard = 0
        for index, turn in enumerate(conversation.turns):
            messages = await environment.get_prompt_messages(state)
            if index > 0:
                _check_same(_said(messages[heard:]), conversation.replies[index - 1])
            heard = len(messages) + 1
            answer = self._library.AssistantMessage(content=turn)
            await environment.add_trajectory_step(state, _trajectory_step(state, messages, answer))
        if state.get("error") is not None:
            raise RewardFailed(f"the environment failed: {state['error']!r}")
        return state


def _trajectory_step(state: Any, messages: Sequence[Any], answer: Any) -> dict[str, Any]:
    return {
        "prompt": messages,
        "completion": [answer],
        "response": None,
        "tokens": None,
        "reward": None,
        "advantage": None,
        "is_truncated": False,
        "trajectory_id": state["trajectory_id"],
        "extras": {},
    }


def _said(messages: Sequence[Any]) -> str:
    texts = [message["content"] for message in messages]
    if not all(isinstance(text, str) for text in texts):
        raise RewardFailed(f"the environment answers with what is no text: {list(messages)!r}")
    return "\n\n".join(texts)


def _check_same(now: str, before: str) -> None:
    if now != before:
        msg = (
            f"the environment answers the same turns with {now!r} and with {before!r}: it must say"
            " the same each time, as each turn is taken wherever there is a process free"
        )
        raise RewardFailed(msg)


def _watch(rubric: Any) -> None:
    """Note what a rubric's functions raise: the library makes a reward of 0 of it."""
    for each in getattr(rubric, "rubrics", ()):
        _watch(each)
    rubric.funcs = [_watched(function) for function in rubric.funcs]


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    async def noted(result: Awaitable[Any]) -> Any:
        with _noting():
            return await result

    @functools.wraps(function)  # the library looks at the signature
    def call(*args: Any, **kwargs: Any) -> Any:
        with _noting():
            result = function(*args, **kwargs)
        return noted(result) if inspect.isawaitable(result) else result

    return call


@contextmanager
def _noting() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        _raised.get().append(error)
        raise


@functools.cache
def _no_client(library: Any) -> Any:
    """Return a client of no model: the policy's turns come from elsewhere."""
    base = import_module(f"{library.__name__}.clients").Client
    methods = dict.fromkeys(base.__abstractmethods__, _refuse)
    return type("NoClient", (base,), methods)(None)


async def _refuse(*args: Any, **kwargs: Any) -> None:
    raise RewardFailed("the environment asks for a model's answer while it is scored")
