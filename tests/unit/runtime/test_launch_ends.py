"""What a launcher makes of signals, of the end of its role, and of the end of the registry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.helpers.launch_world import World, played

from ratchet.errors import RunFailed, UserError
from ratchet.messages import EndRun
from ratchet.runtime import launch as launch_module
from ratchet.runtime.registry_link import Gone
from ratchet.runtime.role import RoleOutcome


@pytest.mark.parametrize("kind", ["registry", "buffer", "trainer"])
def test_a_signal_to_what_a_run_cannot_do_without_ends_it_everywhere(
    world: World, kind: Any
) -> None:
    launched = world.launch(kind)
    outcome = played(launched, launched.request_stop)
    assert outcome == RoleOutcome("stopped", "interrupted")
    (told,) = world.told
    assert told.status == "stopped"
    assert told.reason == f"the launcher of {launched.name} was told to stop"


def test_an_end_that_cannot_be_told_still_ends_the_role_and_is_not_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(message: EndRun) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(world, "end_run", cannot)
    launched = world.launch("buffer")
    with pytest.raises(LookupError, match="a bug"):
        played(launched, launched.request_stop)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("rollout", {}),
        ("trainer", {"num_nodes": 2, "node_rank": 1, "rendezvous": "a:1"}),
    ],
)
def test_whatever_happens_to_another_role_the_run_goes_on(
    world: World, kind: Any, options: Any
) -> None:
    launched = world.launch(kind, **options)
    assert played(launched, launched.request_stop).status == "stopped"
    failed = RoleOutcome("failed", "died too often")
    launched = world.launch(kind, **options)
    assert played(launched, lambda: world.ends.put_nowait(failed)) == failed
    assert world.told == []


@pytest.mark.parametrize("status", ["failed", "user_error"])
def test_a_trainer_that_is_given_up_ends_the_run_with_its_cause(world: World, status: str) -> None:
    launched = world.launch("trainer")
    played(launched, lambda: world.ends.put_nowait(RoleOutcome(status, "no memory")))
    (told,) = world.told
    assert (told.status, told.reason) == ("failed", "trainer-0: no memory")
    launched = world.launch("buffer")
    played(launched, lambda: world.ends.put_nowait(RoleOutcome(status, "buffer died")))
    assert world.told[-1].reason == "buffer died"


def test_a_registry_that_is_away_is_told_of_the_end_when_it_is_back(world: World) -> None:
    world.away = 2  # the word to an earlier life of it was lost, and all others waited for ever
    outcome = RoleOutcome("finished", "3 steps")
    assert played(world.launch("trainer"), lambda: world.ends.put_nowait(outcome)) == outcome
    assert [told.status for told in world.told] == ["finished"] * 3


def test_a_registry_that_has_stopped_is_not_told(world: World) -> None:
    world.away = 10**6

    def act() -> None:
        world.ends.put_nowait(RoleOutcome("failed", "no memory"))
        asyncio.get_running_loop().call_later(0.05, world.gone.put_nowait, Gone(True, "stopped"))

    assert played(world.launch("trainer"), act).detail == "no memory"
    assert world.told


def test_who_is_told_to_stop_does_not_wait_for_a_registry_that_is_away(world: World) -> None:
    world.away = 10**6
    launched = world.launch("trainer", wait_s=1e6)

    def act() -> None:
        world.ends.put_nowait(RoleOutcome("failed", "no memory"))
        asyncio.get_running_loop().call_later(0.05, launched.request_stop)

    assert played(launched, act).detail == "no memory"


@pytest.mark.parametrize(
    "outcome",
    [
        RoleOutcome("stopped", "interrupted"),
        RoleOutcome("run_failed", "buffer: x"),
        RoleOutcome("user_error", "a newer process has taken the name", replaced=True),
    ],
)
def test_an_end_that_others_know_of_or_do_not_share_is_not_told(
    world: World, outcome: RoleOutcome
) -> None:
    assert played(world.launch("buffer"), lambda: world.ends.put_nowait(outcome)) == outcome
    assert world.told == []


def test_a_role_has_some_time_to_end_with_its_registry_and_its_word_counts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_module, "_OVER_S", 20.0)

    def both_end() -> None:
        world.gone.put_nowait(Gone(True, "it has stopped"))
        loop = asyncio.get_running_loop()
        loop.call_later(0.1, world.ends.put_nowait, RoleOutcome("run_failed", "no memory"))

    assert played(world.launch("rollout"), both_end) == RoleOutcome("run_failed", "no memory")
    lost = Gone(False, "it was lost")  # that is no order to wait for
    outcome = played(world.launch("rollout"), lambda: world.gone.put_nowait(lost))
    assert outcome.detail == "it was lost"


def test_a_role_that_outlives_its_registry_is_ended(world: World) -> None:
    outcome = played(
        world.launch("rollout"), lambda: world.gone.put_nowait(Gone(True, "it has stopped"))
    )
    assert outcome == RoleOutcome("finished", "it has stopped")
    outcome = played(
        world.launch("rollout"), lambda: world.gone.put_nowait(Gone(False, "it was lost"))
    )
    assert outcome == RoleOutcome("failed", "it was lost")


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [
        (RoleOutcome("finished", "3 steps"), None, "buffer: the run has ended: 3 steps"),
        (RoleOutcome("stopped"), None, "buffer: stopped"),
        (RoleOutcome("failed", "x died"), RunFailed, "x died"),
        (RoleOutcome("run_failed", "x died"), RunFailed, "x died"),
        (RoleOutcome("user_error", "no model"), UserError, "no model"),
    ],
)
def test_how_an_end_is_told(
    world: World, outcome: RoleOutcome, error: type[Exception] | None, words: str
) -> None:
    launched = world.launch("buffer")
    if error is None:
        assert launched.result(outcome) == words
    else:
        with pytest.raises(error, match=words):
            launched.result(outcome)
