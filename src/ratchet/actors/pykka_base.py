"""Pykka's `Actor` as Ratchet subclasses it: the one place that uses private names of Pykka.

Pykka types `on_start` and `on_stop` as plain functions and the inbox by a class of its own. Here
they may be coroutine functions, and the inbox is ours; so the type checker sees the declarations
below, and the interpreter sees Pykka. Besides these, `Actor` implements Pykka's three abstract
methods. `tests/contract/test_pykka_names.py` holds every name.
"""

from __future__ import annotations

import abc
import threading
from typing import TYPE_CHECKING, Any

import pykka

if TYPE_CHECKING:

    class PykkaActor(abc.ABC):
        """What Ratchet uses of `pykka.Actor`."""

        actor_urn: str
        actor_inbox: Any
        actor_stopped: threading.Event
        _actor_ref: Any

        @classmethod
        def start(cls, *args: Any, **kwargs: Any) -> Any:
            """Make the actor, register it and start its loop."""
            raise NotImplementedError

else:
    PykkaActor = pykka.Actor
