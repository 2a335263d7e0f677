"""A line of a log: what it says, whether it is wanted, how it is shown to people.

Pure: consumes decoded lines, produces verdicts and text; waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, NamedTuple

import msgspec

from ratchet.errors import UserError
from ratchet.observability.logs import LEVELS

_SHOWN_APART: Final = frozenset(("timestamp", "level", "event", "role", "pid", "exception"))


class LogLine(NamedTuple):
    """One line of one process."""

    source: str
    """name of its file without the suffix: ROLE-RANK"""
    timestamp: str
    """its own, or that of the line before it; ISO 8601, UTC"""
    fields: Mapping[str, Any] | None
    """None for a line that is not a JSON object"""
    raw: str

    @property
    def level(self) -> str | None:
        """One of `LEVELS`, or None where there is none."""
        level = (self.fields or {}).get("level")
        return level if level in LEVELS else None

    @property
    def role(self) -> str:
        """The role that wrote it."""
        return str((self.fields or {}).get("role", self.source))

    @property
    def event(self) -> str:
        """What happened; the whole line where it is not a JSON object."""
        return self.raw if self.fields is None else str(self.fields.get("event", ""))


class LineFilter(NamedTuple):
    """Which lines are wanted; all conditions must hold. A line that is not JSON has no fields."""

    role: str | None = None
    """a role or file, or all of a kind: "rollout" for rollout-0, rollout-1 ..."""
    level: str | None = None
    """at least this one; lines without a level pass"""
    event: str | None = None
    """glob, case-sensitive"""
    where: tuple[tuple[str, str], ...] = ()
    """(field, text of its value); a dot reaches into nested fields"""

    @classmethod
    def parse(
        cls,
        *,
        role: str | None = None,
        level: str | None = None,
        event: str | None = None,
        where: Sequence[str] = (),
    ) -> LineFilter:
        """Make a filter from what a user typed; `where` holds texts of the form "field=value".

        Raises:
            UserError: if a level is not known, or a `where` has no "=".
        """
        if level is not None and level not in LEVELS:
            msg = f"--level {level!r} is not known; use one of {', '.join(LEVELS)}"
            raise UserError(msg)
        pairs = []
        for condition in where:
            field, separator, value = condition.partition("=")
            if not separator or not field:
                msg = f"--where {condition!r} is not of the form field=value"
                raise UserError(msg)
            pairs.append((field, value))
        return cls(role, level, event, tuple(pairs))

    def matches(self, line: LogLine) -> bool:
        """Whether the line is wanted."""
        if self.role is not None and not (
            _is_of(line.role, self.role) or _is_of(line.source, self.role)
        ):
            return False
        if self.level is not None and _below(line.level, self.level):
            return False
        if self.event is None and not self.where:
            return True
        if line.fields is None:
            return False
        if self.event is not None and not fnmatchcase(line.event, self.event):
            return False
        return all(_text(_reach(line.fields, field)) == value for field, value in self.where)


ANY_LINE: Final = LineFilter()


def show(line: LogLine) -> str:
    """Return the line for people: time, level, role, event, fields, and an exception below it.

    Control characters are shown as escapes: a log may hold what a model wrote.
    """
    time = line.timestamp[11:23]
    if line.fields is None:
        return f"{time:12} {'':8} {line.source:12} {printable(line.raw)}"
    rest = [
        f"{name}={_text(value)}"
        for name, value in line.fields.items()
        if name not in _SHOWN_APART and value is not None
    ]
    level = (line.level or "").upper()
    text = printable(" ".join([f"{time:12} {level:8} {line.role:12} {line.event}", *rest]))
    exception = line.fields.get("exception")
    if exception is not None:
        below = (f"    {printable(part)}" for part in str(exception).splitlines())
        text = "\n".join([text, *below])
    return text


def printable(text: str) -> str:
    """Return the text with everything that could steer a terminal shown as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _is_of(name: str, role: str) -> bool:
    kind, _, rank = name.rpartition("-")
    return name == role or (kind == role and rank.isdecimal())


def _below(level: str | None, lowest: str) -> bool:
    return level is not None and LEVELS.index(level) < LEVELS.index(lowest)


def _reach(fields: Mapping[str, Any], name: str) -> Any:
    if name in fields:
        return fields[name]
    head, separator, rest = name.partition(".")
    inner = fields.get(head)
    return _reach(inner, rest) if separator and isinstance(inner, Mapping) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
