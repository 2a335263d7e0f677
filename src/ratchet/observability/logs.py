"""Structured logs: one JSON object a line, one file a process.

Consumes events from this package and, through the standard `logging` and `warnings`, from the
libraries below it; produces lines with timestamp (ISO 8601, UTC, microseconds), level, event, role,
pid, the fields of the event, and what the actor runtime has bound to the context of the message
(trace id, version). Waits for nothing but the disk. A line is one write in append mode, so that
neither threads nor processes can tear it.

What looks like a secret by its name never reaches a line.
"""

from __future__ import annotations

import logging
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol, Self

import msgspec
import structlog
from structlog.contextvars import get_contextvars

from ratchet.errors import UserError
from ratchet.observability.log_file import LogFile

LEVELS: Final = ("debug", "info", "warning", "error", "critical")
"""Ascending."""

REDACTED: Final = "[redacted]"
MAX_DEPTH: Final = 16
_SECRET: Final = re.compile(
    r"(?:^|_)(?:key|keys|apikey|token|secrets?|passwords?|passwd|passphrase|authorization"
    r"|credentials?|cookies?)(?:_|$)"
)
_NAMES_A_FILE: Final = re.compile(r"_(?:file|path)$")
_TEXTS: Final = frozenset((str, bytes))
_PLAIN: Final = frozenset((str, bytes, int, float, bool, type(None)))
_CAMEL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")


class Log(Protocol):
    """What everything in Ratchet logs to: an event in snake_case, and its fields."""

    def debug(self, event: str, **fields: Any) -> Any: ...  # noqa: D102
    def info(self, event: str, **fields: Any) -> Any: ...  # noqa: D102
    def warning(self, event: str, **fields: Any) -> Any: ...  # noqa: D102
    def error(self, event: str, **fields: Any) -> Any: ...  # noqa: D102


class SilentLog(Log):
    """For where a failure comes back as an error, or nothing is there yet to write to."""

    def debug(self, event: str, **fields: Any) -> None:
        """Say nothing."""

    info = warning = error = debug


class BoundLog(Log, Protocol):
    """A log that can be given fields which it adds to every event."""

    def bind(self, **fields: Any) -> Self:
        """Return a log that adds these fields."""
        ...


def configure_logging(
    path: Path | None,
    *,
    role: str,
    run: str,
    level: str = "info",
    wall_time: Callable[[], float] = time.time,
) -> BoundLog:
    """Send the logs of this process, libraries included, to a file.

    A second call moves the libraries' logs to its file; logs made by the first keep theirs.

    Args:
        path: the file to append to; None for standard error.
        role: name of the role, on each line.
        run: id of the run, on the first line.
        level: the lowest level that is written; a filtered event costs under a microsecond.
        wall_time: seconds since the epoch.

    Raises:
        UserError: if the level is not known, or the file cannot be opened.
    """
    if level not in LEVELS:
        msg = f"log level {level!r} is not known; use one of {', '.join(LEVELS)}"
        raise UserError(msg)
    log: BoundLog = structlog.wrap_logger(
        LogFile(path),
        processors=[_Stamp(wall_time), _encode],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        context_class=dict,
    ).bind(role=role, pid=os.getpid())
    root = logging.getLogger()
    for handler in [h for h in root.handlers if isinstance(h, _Bridge)]:
        root.removeHandler(handler)
    root.addHandler(_Bridge(log))
    root.setLevel(level.upper())
    logging.captureWarnings(capture=True)
    route_library_logs()
    log.info("log_opened", run=run, lowest=level)
    return log


def route_library_logs() -> None:
    """Take from every standard logger the handlers that write to the terminal, and let its events
    come to our file. Call it again once libraries that set up loggers of their own are imported
    (torch, transformers).
    """
    for logger in list(logging.Logger.manager.loggerDict.values()):
        if not isinstance(logger, logging.Logger):
            continue
        own = [handler for handler in logger.handlers if _writes_to_the_terminal(handler)]
        for handler in own:
            logger.removeHandler(handler)
        if own:
            logger.propagate = True


def _writes_to_the_terminal(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and not isinstance(
        handler, logging.FileHandler
    )


def redact(fields: Mapping[Any, Any], depth: int = 0) -> dict[Any, Any]:
    """Return a copy in which texts named like a secret are replaced, at any depth down to
    `MAX_DEPTH`; what lies deeper is left out.
    """
    return {
        name: REDACTED
        if type(value) in _TEXTS and _is_secret(str(name))
        else (value if type(value) in _PLAIN else _redact_value(value, depth + 1))
        for name, value in fields.items()
    }


def _redact_value(value: Any, depth: int) -> Any:
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if depth > MAX_DEPTH:
        return f"[deeper than {MAX_DEPTH}]"
    if isinstance(value, Mapping):
        return redact(value, depth)
    return [_redact_value(item, depth + 1) for item in value]


@lru_cache(maxsize=4096)
def _is_secret(name: str) -> bool:
    words = _CAMEL.sub("_", name).lower()
    return _SECRET.search(words) is not None and _NAMES_A_FILE.search(words) is None


class _Stamp:
    """Puts timestamp, level and event first, and adds what is bound to the context."""

    def __init__(self, wall_time: Callable[[], float]) -> None:
        self._wall_time = wall_time

    def __call__(
        self, _logger: Any, level: str, fields: MutableMapping[str, Any]
    ) -> Mapping[str, Any]:
        moment = datetime.fromtimestamp(self._wall_time(), UTC)
        stamped: dict[str, Any] = {
            "timestamp": moment.isoformat(timespec="microseconds")[:26] + "Z",
            "level": level,
            "event": fields.pop("event"),
        }
        for name in _STAMPED & fields.keys():
            fields[f"{name}_"] = fields.pop(name)
        error = fields.pop("exc_info", None)
        stamped.update(get_contextvars())
        stamped.update(redact(fields))
        if error is not None and error is not False:
            stamped["exception"] = _traceback(error)
        return stamped


def _traceback(error: Any) -> str:
    if isinstance(error, BaseException):
        return "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, tuple):
        return "".join(traceback.format_exception(*error)).rstrip()
    return traceback.format_exc().rstrip()


_STAMPED: Final = frozenset(("timestamp", "level"))
_encoder: Final = msgspec.json.Encoder(enc_hook=repr)


_UNENCODABLE: Final = (TypeError, ValueError, OverflowError, RecursionError)


def _encode(_logger: Any, _level: str, fields: MutableMapping[str, Any]) -> bytes:
    try:
        return _encoder.encode(fields) + b"\n"
    except _UNENCODABLE:
        plain = {ascii(name)[1:-1]: _sayable(value) for name, value in fields.items()}
        return _encoder.encode(plain) + b"\n"


def _sayable(value: Any) -> Any:
    # a log never fails for what it is given: what JSON cannot say is shown as Python does
    try:
        _encoder.encode(value)
    except _UNENCODABLE:
        return ascii(value)
    return value


class _Bridge(logging.Handler):
    """Brings events of the standard library's loggers to ours."""

    def __init__(self, log: BoundLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record as an event; the text is the event."""
        try:
            fields: dict[str, Any] = {"logger": record.name}
            if record.exc_info and record.exc_info[1] is not None:
                fields["exc_info"] = record.exc_info[1]
            self._write(record.levelno)(record.getMessage(), **fields)
        except Exception:  # noqa: BLE001 - the contract of a handler: never into a library
            self.handleError(record)

    def _write(self, level: int) -> Callable[..., Any]:
        if level >= logging.ERROR:
            return self._log.error
        if level >= logging.WARNING:
            return self._log.warning
        return self._log.info if level >= logging.INFO else self._log.debug
