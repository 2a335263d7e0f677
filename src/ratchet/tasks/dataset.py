"""The task "dataset": problems from tables on this machine's disk.

Consumes what `datasets.Dataset.save_to_disk` wrote, or parquet, Arrow and JSONL files, or a folder
of them; produces prompts in the order of the data. Waits for the disk, never for a network, and
runs no code that comes with the data. Tables are read with pyarrow alone, which the datasets
library is built upon and which reads all that it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ratchet.errors import TaskError
from ratchet.tasks.answered import AnsweredArgs, AnsweredTask, split_rows
from ratchet.tasks.answers import find_score
from ratchet.tasks.arguments import parse_args, suggest
from ratchet.tasks.chat import messages_text
from ratchet.tasks.problems import Splits, problem_id
from ratchet.tasks.tables import find_files, read_rows
from ratchet.types import Prompt


class DatasetArgs(AnsweredArgs):
    """`task.args` of the task "dataset". A field is a column, or a path into one: "a.b"."""

    split: str | None = None
    """Which split of `path` is trained on; needed where there are several."""
    eval_split: str | None = None
    """Which split of `eval_path`, or else of `path`, is held out whole, in place of `holdout`."""
    prompt_field: str = "prompt"
    """A text, or chat messages: one of the user, perhaps behind one of the system. The two are
    joined by an empty line; `model.chat_template` makes a message of the user of it.
    """
    answer_field: str | None = "answer"
    """A text or a whole number. Need not be there where `task.reward` scores."""
    answer_after: str | None = None
    """The answer is what follows the last of these, for example "####"."""
    id_field: str | None = None
    """A text or a whole number; by default an id is made of the prompt."""
    metadata_fields: list[str] = []
    """What a reward finds in `prompt.metadata`."""


def build_dataset(args: Mapping[str, Any], *, needs_answers: bool) -> AnsweredTask:
    """Build the task from `task.args`.

    Args:
        args: the table.
        needs_answers: whether a row without an answer is an error; it is not where `task.reward`
            scores.

    Raises:
        TaskError: if an argument is wrong; and from the task's prompts, with file and row, if the
            data is.
    """
    parsed = parse_args(DatasetArgs, args)
    if find_spec("pyarrow") is None:
        msg = (
            'task.name = "dataset" needs the library pyarrow, which is not installed;'
            " pip install 'ratchet-rl[dataset]'"
        )
        raise TaskError(msg)

    def read() -> Splits:
        held_out, held_out_by = None, "eval_path" if parsed.eval_path else "eval_split"
        if parsed.eval_path is not None or parsed.eval_split is not None:
            path = parsed.eval_path if parsed.eval_path is not None else parsed.path
            held_out = _rows(parsed, held_out_by, path, parsed.eval_split, needs_answers)
        train = _rows(parsed, "path", parsed.path, parsed.split, needs_answers)
        return split_rows(train, held_out, parsed.holdout, held_out_by=held_out_by)

    return AnsweredTask(read, find_score(parsed.score))


def _rows(
    args: DatasetArgs, field: str, path: str, split: str | None, needs_answers: bool
) -> Iterator[tuple[str, Prompt]]:
    files = find_files(Path(path).expanduser(), field=field, split=split)
    fields = [args.prompt_field, args.answer_field, args.id_field, *args.metadata_fields]
    optional = None if needs_answers else args.answer_field
    for place, row in read_rows(files, [name for name in fields if name is not None], optional):
        yield place, _prompt(args, place, row, needs_answers)


def _prompt(args: DatasetArgs, place: str, row: Mapping[str, Any], needs_answers: bool) -> Prompt:
    text = _text(_value(row, "prompt_field", args.prompt_field, place), place)
    identity = None
    if args.id_field is not None:
        identity = _word(_value(row, "id_field", args.id_field, place), args.id_field, place)
    return Prompt(
        prompt_id=problem_id(text) if identity is None else identity,
        text=text,
        reference=_answer(args, place, row, needs_answers),
        metadata={
            name: _value(row, "metadata_fields", name, place) for name in args.metadata_fields
        },
    )


def _value(row: Mapping[str, Any], argument: str, field: str, place: str) -> Any:
    """Return a field of a row: of that name, or at that path."""
    if field in row:
        return row[field]
    found: Any = row
    for part in field.split("."):
        if not isinstance(found, Mapping) or part not in found:
            known = [str(name) for name in found] if isinstance(found, Mapping) else []
            msg = f"{place}: there is no field {field!r} (task.args.{argument})"
            raise TaskError(f"{msg}; {suggest(part, known)}" if known else msg)
        found = found[part]
    return found


def _text(prompt: object, place: str) -> str:
    try:
        return messages_text(prompt)
    except ValueError as error:
        msg = f"{place}: the prompt is {error}"
        raise TaskError(msg) from None


def _answer(
    args: DatasetArgs, place: str, row: Mapping[str, Any], needs_answers: bool
) -> str | None:
    field = args.answer_field
    if field is None or (not needs_answers and field.partition(".")[0] not in row):
        value = None
    else:
        value = _value(row, "answer_field", field, place)
    if value is None:
        if needs_answers:
            msg = f"{place}: there is no answer; give one, or score with a function: task.reward"
            raise TaskError(msg)
        return None
    answer = _word(value, str(field), place)
    if args.answer_after is None:
        return answer
    _, mark, answer = answer.rpartition(args.answer_after)
    if not mark:
        msg = f"{place}: the answer has no {args.answer_after!r} in it (task.args.answer_after)"
        raise TaskError(msg)
    return answer.strip()


def _word(value: object, field: str, place: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    msg = f"{place}: {field} = {value!r} is neither a text nor a whole number"
    raise TaskError(msg)
