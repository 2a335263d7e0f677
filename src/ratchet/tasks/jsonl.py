"""The task "jsonl": problems from a file of one JSON object per line.

Consumes {"prompt": str, "answer"?: str, "id"?: str, "metadata"?: object} lines, produces prompts in
the file's order; waits for the disk. `score` says when a completion is right (`tasks.answers`); a
score of one's own goes into `task.reward`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ratchet.errors import TaskError
from ratchet.tasks.answered import AnsweredArgs, AnsweredTask, split_rows
from ratchet.tasks.answers import find_score
from ratchet.tasks.arguments import parse_args
from ratchet.tasks.problems import Splits, problem_id
from ratchet.types import Prompt


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    answer: str | None = None
    id: str | None = None
    metadata: dict[str, Any] = {}


def build_jsonl(args: Mapping[str, Any], *, needs_answers: bool) -> AnsweredTask:
    """Build the task from `task.args`.

    Args:
        args: the table.
        needs_answers: whether a line without an answer is an error; it is not where `task.reward`
            scores.

    Raises:
        TaskError: if an argument is wrong; and from the task's prompts, with file and line, if the
            data is.
    """
    parsed = parse_args(AnsweredArgs, args)

    def read() -> Splits:
        held_out = None
        if parsed.eval_path is not None:
            held_out = _rows("eval_path", parsed.eval_path, needs_answers)
        train = _rows("path", parsed.path, needs_answers)
        return split_rows(train, held_out, parsed.holdout, held_out_by="eval_path")

    return AnsweredTask(read, find_score(parsed.score))


def lines(field: str, path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the place ("file:line") and the bytes of each line that is not blank.

    Raises:
        TaskError: if the file, which `task.args.<field>` names, cannot be read.
    """
    try:
        with path.expanduser().open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", line
    except OSError as error:
        msg = f"task.args.{field} = {str(path)!r}: cannot read {path.resolve()}: {error.strerror}"
        raise TaskError(msg) from None


def _rows(field: str, path: str, needs_answers: bool) -> Iterator[tuple[str, Prompt]]:
    for place, line in lines(field, Path(path)):
        yield place, _parse(line, place, needs_answers)


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
