"""The names of Pykka that Ratchet relies on without their being documented.

`ratchet.actors` subclasses `pykka.Actor`, does not call its `__init__`, and replaces its loop. A
release of Pykka that changes one of these must be looked at before it is allowed in.
"""

from __future__ import annotations

import abc
import inspect
from importlib import metadata
from typing import Any

import pykka

from ratchet.actors import pykka_base


def test_the_version_is_the_one_that_was_looked_at() -> None:
    assert metadata.version("pykka").split(".")[:2] == ["4", "5"]


def test_the_base_is_pykkas_actor() -> None:
    assert pykka_base.PykkaActor is pykka.Actor


def test_the_abstract_methods_are_the_three_that_we_implement() -> None:
    assert pykka.Actor.__abstractmethods__ == {
        "_create_actor_inbox",
        "_create_future",
        "_start_actor_loop",
    }
    assert isinstance(pykka.Actor, abc.ABCMeta)


def test_start_makes_registers_and_starts_in_this_order_and_returns_the_ref() -> None:
    events: list[str] = []

    class Plain(pykka.Actor):
        def __init__(self) -> None:
            events.append("made")
            self._actor_ref: Any = "the ref"

        @staticmethod
        def _create_actor_inbox() -> Any:
            raise AssertionError("only Actor.__init__ calls it")

        @staticmethod
        def _create_future() -> Any:
            raise AssertionError

        def _start_actor_loop(self) -> None:
            events.append(f"registered {pykka.ActorRegistry.get_all()[-1]}")

        def __str__(self) -> str:
            return "plain"

    assert Plain.start() == "the ref"
    pykka.ActorRegistry.unregister("the ref")  # type: ignore[arg-type]
    assert events == ["made", "registered the ref"]


def test_what_pykkas_init_sets_is_what_ours_sets() -> None:
    class Plain(pykka.ThreadingActor):
        pass

    assert set(vars(Plain())) == {"actor_urn", "actor_inbox", "actor_stopped", "_actor_ref"}


def test_what_a_ref_takes_from_its_actor() -> None:
    names = inspect.getclosurevars(pykka.ActorRef.__init__).unbound
    assert {"actor_urn", "actor_inbox", "actor_stopped"} <= names


def test_the_signatures_that_ours_keep() -> None:
    ask = inspect.signature(pykka.ActorRef.ask).parameters
    assert list(ask) == ["self", "message", "block", "timeout"]
    assert ask["block"].default is True
    stop = inspect.signature(pykka.ActorRef.stop).parameters
    assert list(stop) == ["self", "block", "timeout"]
    failure = inspect.signature(pykka.Actor.on_failure).parameters
    assert list(failure) == ["self", "exception_type", "exception_value", "traceback"]
    assert list(inspect.signature(pykka.Future.set_exception).parameters) == ["self", "exc_info"]
    assert list(inspect.signature(pykka.Future.set_get_hook).parameters) == ["self", "func"]


def test_a_derived_future_is_made_by_its_class_without_arguments() -> None:
    class Plain(pykka.ThreadingFuture[int]):
        made = 0

        def __init__(self) -> None:
            super().__init__()
            Plain.made += 1

    Plain().map(lambda value: value)
    assert Plain.made == 2
