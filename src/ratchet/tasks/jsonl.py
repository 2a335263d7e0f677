"""The task "jsonl": problems from a file of one JSON object per line.

Consumes {"prompt": str, "answer"?: str, "id"?: str, "metadata"?: object} lines, produces prompts in
the file's order; waits for nothing. A completion is right if it equals the answer, white space at
both ends aside; a score of one's own goes into `task.reward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ratchet.errors import RewardFailed, TaskError
from ratchet.tasks.arguments import Holdout, TaskArgs, parse_args
from ratchet.tasks.base import Split
from ratchet.tasks.problems import Splits, problem_id, split_by_text
from ratchet.types import Prompt


class JsonlArgs(TaskArgs):
    """`task.args` of the task "jsonl"."""

    path: str
    """The file; a relative path starts at the working directory."""
    eval_path: str | None = None
    """A second file that is all held out, in place of `holdout`."""
    holdout: Holdout = 0


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    answer: str | None = None
    id: str | None = None
    metadata: dict[str, Any] = {}


class JsonlTask:
    """Problems with known answers, or with a reward function of the user's own."""

    def __init__(self, splits: Splits) -> None:
        self._splits = splits

    def prompts(self, split: Split) -> tuple[Prompt, ...]:
        """Return the prompts of a split, in the order of the file."""
        return self._splits.of(split)

    def score(self, prompt: Prompt, completion: str) -> float:
        """Return 1.0 if the completion is the answer, white space at both ends aside, else 0.0.

        Raises:
            RewardFailed: if the prompt has no answer.
        """
        if prompt.reference is None:
            msg = f"the prompt {prompt.prompt_id!r} has no answer to compare with"
            raise RewardFailed(msg)
        return float(completion.strip() == prompt.reference.strip())


def build_jsonl(args: Mapping[str, Any], *, needs_answers: bool) -> JsonlTask:
    """Build the task from `task.args`.

    Args:
        args: the table.
        needs_answers: whether a line without an answer is an error; it is not where `task.reward`
            scores.

    Raises:
        TaskError: if an argument is wrong, or with file and line if the data is.
    """
    parsed = parse_args(JsonlArgs, args)
    if parsed.eval_path is None:
        prompts = _read({"path": parsed.path}, needs_answers)["path"]
        return JsonlTask(split_by_text(prompts, parsed.holdout))
    if parsed.holdout:
        msg = (
            f"task.args.holdout = {parsed.holdout:g} and task.args.eval_path ="
            f" {parsed.eval_path!r} both say what is held out; give one of them"
        )
        raise TaskError(msg)
    files = _read({"path": parsed.path, "eval_path": parsed.eval_path}, needs_answers)
    train = {prompt.text: prompt.prompt_id for prompt in files["path"]}
    for prompt in files["eval_path"]:
        if prompt.text in train:
            msg = (
                f"the problem {prompt.text!r} is in {parsed.path} (id {train[prompt.text]}) and in"
                f" {parsed.eval_path} (id {prompt.prompt_id}); held-out problems must not be"
                " trained on, so take it out of one of them"
            )
            raise TaskError(msg)
    return JsonlTask(Splits(tuple(files["path"]), tuple(files["eval_path"])))


def _read(files: Mapping[str, str], needs_answers: bool) -> dict[str, list[Prompt]]:
    """Read the file of each argument; ids are unique across all of them."""
    prompts: dict[str, list[Prompt]] = {field: [] for field in files}
    place_of: dict[str, str] = {}
    for field, path in files.items():
        for place, line in _lines(field, Path(path)):
            prompt = _parse(line, place, needs_answers)
            first = place_of.setdefault(prompt.prompt_id, place)
            if first != place:
                msg = (
                    f"{place}: the id {prompt.prompt_id!r} is already taken by {first} (without an"
                    ' "id", the same prompt has the same one); remove the line, or give it an "id"'
                    " of its own"
                )
                raise TaskError(msg)
            prompts[field].append(prompt)
        if not prompts[field]:
            msg = f"task.args.{field} = {path!r}: the file has no lines"
            raise TaskError(msg)
    return prompts


def _lines(field: str, path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place ("file:line") and the bytes of each line that is not blank."""
    try:
        with path.expanduser().open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        msg = f"task.args.{field} = {str(path)!r}: cannot read {path.resolve()}: {error.strerror}"
        raise TaskError(msg) from None


def _parse(line: bytes, place: str, needs_answers: bool) -> Prompt:
    try:
        parsed = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        msg = (
            f'{place}: {error}; a line is {{"prompt": "...", "answer": "...", "id": "...",'
            ' "metadata": {...}}, of which only "prompt" is always needed'
        )
        raise TaskError(msg) from None
    if needs_answers and parsed.answer is None:
        msg = f'{place}: "answer" is missing; add it, or score with a function: task.reward'
        raise TaskError(msg)
    return Prompt(
        prompt_id=problem_id(parsed.prompt) if parsed.id is None else parsed.id,
        text=parsed.prompt,
        reference=parsed.answer,
        metadata=parsed.metadata,
    )
