"""The task "verifiers": environments of the library of that name.

Consumes an environment's name and arguments, produces its prompts, its answers to the policy's
turns and its rewards; waits for the environment's own code. A prompt is known by its row in the
environment's data, which is built when prompts are first asked for or scored.

The library has had two APIs: classic environments, of one turn or several (`verifiers_env`), and
from 0.4 on tasksets, of one turn here (`verifiers_taskset`). The one that is installed is used. Of
environments whose turns are calls of tools nothing is taken: their messages are those of a server
that parses such calls, and the policy here speaks text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Annotated, Any, Final, Protocol

from pydantic import Field

from ratchet.errors import RewardFailed, TaskError
from ratchet.tasks.arguments import Holdout, TaskArgs, parse_args
from ratchet.tasks.base import Conversation, Split, Step
from ratchet.tasks.chat import messages_text
from ratchet.tasks.problems import Splits, problem_id, split_by_text
from ratchet.types import Prompt

_INSTALL: Final = "pip install 'ratchet-rl[verifiers]'"


class ProblemSource(Protocol):
    """An environment of either API."""

    max_turns: int
    """-1: no limit."""

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]] | None:
        """Return the rows of a split, each with its `prompt`, a text or chat messages, and perhaps
        an `answer`; None if there is no data for it.
        """
        ...

    def reply(self, row: Mapping[str, Any], conversation: Conversation) -> str | None:
        """Return what the environment says next; None if the conversation is over."""
        ...

    def reward(self, row: Mapping[str, Any], conversation: Conversation) -> float:
        """Return the reward of a conversation that is over."""
        ...


class VerifiersArgs(TaskArgs):
    """`task.args` of the task "verifiers"."""

    environment: str
    """Name of an installed environment, as `verifiers.load_environment` takes it; from 0.4 on, of a
    taskset."""
    args: dict[str, Any] = {}
    """What the environment takes; of a taskset, the fields of its configuration."""
    turns: Annotated[int, Field(gt=0)] | None = None
    """Turns that the policy has; by default the environment's own limit, where it has one."""
    holdout: Holdout = 0
    """Only where the environment has no data of its own for evaluation."""


class VerifiersTask:
    """The problems of one environment of one turn, scored by its rubric."""

    def __init__(self, args: VerifiersArgs, environment: ProblemSource) -> None:
        self._args = args
        self._environment = environment

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """Return the prompts of a split, in the order of the data; of a problem that is there
        twice, the first.

        Raises:
            TaskError: if a row's prompt is no text, or nothing is left to train on.
        """
        return self._splits.of(split)

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return the rubric's reward of a completion.

        Raises:
            RewardFailed: if one of the rubric's functions raised.
        """
        return self._environment.reward(self._row(prompt), Conversation((completion,)))

    @cached_property
    def _splits(self) -> Splits:
        train = self._prompts("train")
        if self._environment.rows("eval") is None:
            return split_by_text(train, self._args.holdout)
        if self._args.holdout:
            msg = (
                f"task.args.holdout = {self._args.holdout:g}, and the environment"
                f" {self._args.environment!r} has data of its own for evaluation; leave it out"
            )
            raise TaskError(msg)
        held_out = self._prompts("eval")
        texts = {prompt.text for prompt in held_out}
        left = tuple(prompt for prompt in train if prompt.text not in texts)
        if not left:
            msg = (
                f"task.args.environment = {self._args.environment!r} evaluates on every problem"
                " that it trains on, so nothing is left to train on; give it task.args.args that"
                " keep them apart"
            )
            raise TaskError(msg)
        return Splits(left, held_out)

    def _prompts(self, split: Split) -> tuple[Prompt, ...]:
        prompts: dict[str, Prompt] = {}
        for index, row in enumerate(self._environment.rows(split) or ()):
            text = self._text(row, f"row {index} of {split}")
            if text not in prompts:
                answer = row.get("answer")
                prompts[text] = Prompt(
                    prompt_id=problem_id(text),
                    text=text,
                    reference=answer if isinstance(answer, str) and answer else None,
                    metadata={"split": split, "row": index},
                )
        return tuple(prompts.values())

    def _text(self, row: Mapping[str, Any], place: str) -> str:
        try:
            return messages_text(row.get("prompt"))
        except ValueError as error:
            msg = f"task.args.environment = {self._args.environment!r}: {place} is {error}"
            raise TaskError(msg) from None

    def _row(self, prompt: Prompt) -> Mapping[str, Any]:
        rows, index = self._environment.rows(prompt.metadata["split"]), prompt.metadata["row"]
        if (
            rows is None
            or index >= len(rows)
            or messages_text(rows[index]["prompt"]) != prompt.text
        ):
            msg = (
                f"the environment {self._args.environment!r} has another problem at row {index} in"
                f" this process than {prompt.text!r}: its data must be the same each time"
            )
            raise RewardFailed(msg)
        row: Mapping[str, Any] = rows[index]
        return row


class VerifiersTurnsTask(VerifiersTask):
    """The problems of one environment of several turns."""

    def __init__(self, args: VerifiersArgs, environment: ProblemSource, turns: int) -> None:
        super().__init__(args, environment)
        self._turns = turns

    def max_turns(self, prompt: Prompt) -> int:
        """Return how many turns the policy has; the same for all prompts."""
        del prompt
        return self._turns

    def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        """Return what the environment answers to the last turn.

        Raises:
            RewardFailed: if the environment failed, or answers the same turns in another way.
        """
        return Step(self._environment.reply(self._row(prompt), conversation))

    def score_conversation(self, prompt: Prompt, conversation: Conversation) -> float:
        """Return the rubric's reward of an ended conversation. Raises as `score` and `step`."""
        return self._environment.reward(self._row(prompt), conversation)


def build_verifiers(
    args: Mapping[str, Any], seed: int, *, needs_rubric: bool = True
) -> VerifiersTask:
    """Build the task from `task.args`.

    Args:
        args: the table.
        seed: the run's.
        needs_rubric: whether the rubric scores; it does not where there is `task.reward`.

    Raises:
        TaskError: if an argument is wrong, the library or the environment is not installed, or it
            is of a kind that cannot be trained here.
    """
    parsed = parse_args(VerifiersArgs, args)
    environment = _load(parsed, seed, needs_rubric=needs_rubric)
    turns = environment.max_turns if parsed.turns is None else parsed.turns
    if turns < 1:
        msg = (
            f"task.args.environment = {parsed.environment!r} sets no limit on turns; give"
            " task.args.turns"
        )
        raise TaskError(msg)
    if environment.max_turns == 1 and turns > 1:
        msg = (
            f"task.args.turns = {turns}, and the environment {parsed.environment!r} has one turn;"
            " leave it out"
        )
        raise TaskError(msg)
    if turns == 1:
        return VerifiersTask(parsed, environment)
    return VerifiersTurnsTask(parsed, environment, turns)


def _load(args: VerifiersArgs, seed: int, *, needs_rubric: bool) -> ProblemSource:
    if find_spec("verifiers") is None:
        msg = f'task.name = "verifiers": the library is not installed; {_INSTALL}'
        raise TaskError(msg)
    if hasattr(import_module("verifiers"), "load_environment"):
        from ratchet.tasks.verifiers_env import load_environment

        return load_environment(args.environment, args.args, seed, needs_rubric=needs_rubric)
    if find_spec("verifiers.v1") is None:
        msg = (
            f"the library verifiers {version('verifiers')} has an API that is not known here;"
            f" {_INSTALL} brings one that is"
        )
        raise TaskError(msg)
    from ratchet.tasks.verifiers_taskset import load_taskset

    return load_taskset(args.environment, args.args, seed, needs_rewards=needs_rubric)
