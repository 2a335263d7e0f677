"""What tests of actors share: a system with counted ids, and a log that remembers."""

from __future__ import annotations

import itertools
import random
from typing import Any

import structlog.contextvars

from ratchet.actors.actor import Actor
from ratchet.actors.system import System
from ratchet.messages import Down


class RecordingLog:
    """Keeps (level, event, fields); the fields include those bound to the log context."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, dict[str, Any]]] = []

    def _note(self, level: str, event: str, fields: dict[str, Any]) -> None:
        bound = structlog.contextvars.get_contextvars()
        self.events.append((level, event, {**bound, **fields}))

    def debug(self, event: str, **fields: Any) -> None:
        self._note("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._note("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._note("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        self._note("error", event, fields)

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for _, name, fields in self.events if name == event]


def make_system(**kwargs: Any) -> System:
    """A system with ids "id-0", "id-1" ..., and `system.log` a `RecordingLog`."""
    ids = itertools.count()
    defaults: dict[str, Any] = {
        "rng": random.Random(0),
        "wall_time": lambda: 1.7e9,
        "new_id": lambda: f"id-{next(ids)}",
        "log": RecordingLog(),
    }
    return System(**{**defaults, **kwargs})


class Witness(Actor[Down]):
    """Puts each `Down` that it is told into a list and wakes whoever awaits `heard`."""

    def __init__(self, system: System, name: str, heard: Any) -> None:
        super().__init__(system, name)
        self._heard = heard

    def receive(self, message: Down) -> None:
        match message:
            case Down():
                self._heard.put_nowait((message.name, message.reason))
