"""What the files of a run say of it when nobody answers any more.

Consumes summary.json and the logs of a run directory, any of which may be missing; produces an
`Aftermath` and its text. Waits for nothing; reads only.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from ratchet.errors import UserError
from ratchet.observability.follow import read_logs
from ratchet.observability.lines import LogLine, printable, show
from ratchet.observability.rundir import RunDirectory

_MOST_ERRORS: Final = 3


class Aftermath(msgspec.Struct, frozen=True):
    """What is known of a run that cannot be asked."""

    directory: str
    why: str
    """why it cannot be asked"""
    outcome: str | None
    """how it ended, as the launcher, else the trainer or the registry, has written"""
    cause: str | None
    steps: int | None
    first_error: str | None
    last_errors: tuple[str, ...]
    """log lines, oldest first; without the first one"""
    running: bool = False


class _Summary(msgspec.Struct):
    status: str | None = None
    reason: str | None = None
    steps: int | None = None


def look_back(run: RunDirectory, why: str) -> Aftermath:
    """Gather what the files say.

    Raises:
        UserError: a file is damaged.
    """
    summary = _read_summary(run)
    outcome, cause = summary.status, summary.reason
    by_launcher = False
    first: str | None = None
    last: deque[str] = deque(maxlen=_MOST_ERRORS)
    for line in read_logs(run.logs):
        if line.event == "run_ended" and not by_launcher:
            by_launcher = line.role == "launcher"
            if by_launcher or outcome is None:
                outcome, cause = _said(line, "status"), _said(line, "detail", "reason")
        if line.level in {"error", "critical"}:
            if first is None:
                first = show(line)
            else:
                last.append(show(line))
    return Aftermath(str(run.root), why, outcome, cause, summary.steps, first, tuple(last))


def describe(aftermath: Aftermath) -> Iterator[str]:
    """Yield the lines for people."""
    yield printable(f"{aftermath.directory}: no run responds: {aftermath.why}")
    if aftermath.outcome is None:
        yield "nothing says how it ended: it was killed, or never began"
    else:
        cause = f": {aftermath.cause}" if aftermath.cause else ""
        steps = f" after {aftermath.steps} steps" if aftermath.steps is not None else ""
        yield printable(f"it ended: {aftermath.outcome}{steps}{cause}")
    if aftermath.first_error is not None:
        yield f"first error: {aftermath.first_error}"
    for error in aftermath.last_errors:
        yield f"later error: {error}"
    yield printable(f"ratchet logs {shlex.quote(aftermath.directory)} --level warning has more")


def _read_summary(run: RunDirectory) -> _Summary:
    try:
        return msgspec.json.decode(run.summary.read_bytes(), type=_Summary)
    except FileNotFoundError:
        return _Summary()
    except (OSError, msgspec.DecodeError) as error:
        msg = f"{run.summary} cannot be read: {error}"
        raise UserError(msg) from None


def _said(line: LogLine, *names: str) -> str | None:
    fields = line.fields or {}
    return next((str(fields[name]) for name in names if fields.get(name)), None)
