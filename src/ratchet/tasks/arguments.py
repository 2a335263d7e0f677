"""The typed arguments of the built-in tasks.

Consumes the table `task.args`, produces a frozen model or a `TaskError` that names each field, its
value and the way out. Waits for nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from ratchet.errors import TaskError


def _check_holdout(value: float) -> float:
    if 0 < value < 1 or (value >= 0 and value.is_integer()):
        return value
    msg = "give a number of problems (0, 1, 2 ...) or a share between 0 and 1"
    raise ValueError(msg)


Holdout = Annotated[float, AfterValidator(_check_holdout)]
"""What is kept for evaluation: a number of problems, or, between 0 and 1, a share of them."""


class TaskArgs(BaseModel):
    """Base of the arguments of a built-in task."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


ArgsT = TypeVar("ArgsT", bound=TaskArgs)


def parse_args(model: type[ArgsT], args: Mapping[str, Any]) -> ArgsT:
    """Validate `task.args`.

    Raises:
        TaskError: with one line per problem.
    """
    try:
        return model.model_validate(dict(args))
    except ValidationError as error:
        lines = [_explain(model, details) for details in error.errors(include_url=False)]
        msg = lines[0] if len(lines) == 1 else "task.args:\n  " + "\n  ".join(lines)
        raise TaskError(msg) from None


def suggest(wrong: str, known: list[str]) -> str:
    """Return the way out for a wrong name: the closest one that is known, or all of them."""
    close = difflib.get_close_matches(wrong, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(known))}"


def _explain(model: type[TaskArgs], details: Mapping[str, Any]) -> str:
    field = ".".join(["task.args", *(str(part) for part in details["loc"])])
    if details["type"] == "extra_forbidden":
        return f"unknown key {field}; {suggest(str(details['loc'][0]), list(model.model_fields))}"
    if details["type"] == "missing":
        return f"{field} is missing"
    return f"{field} = {details['input']!r}: {str(details['msg']).removeprefix('Value error, ')}"
