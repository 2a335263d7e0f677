"""A launcher whose trainer stands by: when it starts one, and what ends the wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.helpers.launch_world import World, played

from ratchet.errors import ConfigError, UserError
from ratchet.runtime import launch as launch_module
from ratchet.runtime.role import RoleOutcome


def stands_by(world: World, monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[RoleOutcome | str]:
    """Return where the end of each watch is put."""
    watches = asyncio.Queue[RoleOutcome | str]()

    async def stand_by(*_: Any) -> RoleOutcome | str:
        return await watches.get()

    async def with_term(outcome: RoleOutcome, _: Any) -> RoleOutcome:
        return RoleOutcome(outcome.status, f"{outcome.detail}; term 2", replaced=outcome.replaced)

    monkeypatch.setattr(launch_module, "stand_by", stand_by)
    monkeypatch.setattr(launch_module, "with_newest_term", with_term)
    return watches


def test_a_standby_starts_a_trainer_when_the_place_is_vacant_and_stands_by_when_it_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = world.launch("trainer", standby=True)
    watches = stands_by(world, monkeypatch)

    def act() -> None:
        assert world.placement is None  # nothing of a trainer is there yet
        watches.put_nowait("trainer-0 is gone: silent")
        world.ends.put_nowait(RoleOutcome("user_error", "term 1 is fenced", replaced=True))
        watches.put_nowait("trainer-0 is gone: again")
        world.ends.put_nowait(RoleOutcome("finished", "3 steps"))

    assert played(launched, act) == RoleOutcome("finished", "3 steps")
    assert [line for line in world.said if "takes over" in line or "term" in line] == [
        "trainer-0 takes over: trainer-0 is gone: silent",
        "trainer-0: term 1 is fenced; term 2",
        "trainer-0 takes over: trainer-0 is gone: again",
    ]
    assert [told.status for told in world.told] == ["finished"]


def test_a_standby_that_is_not_needed_ends_with_the_run_or_when_told_to(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = world.launch("trainer", standby=True)
    watches = stands_by(world, monkeypatch)
    over = RoleOutcome("finished", "3 steps")
    assert played(launched, lambda: watches.put_nowait(over)) == over
    launched = world.launch("trainer", standby=True)
    stands_by(world, monkeypatch)
    assert played(launched, launched.request_stop) == RoleOutcome("stopped", "interrupted")
    assert world.placement is None
    assert world.told == []  # the run goes on without it


def test_a_trainer_that_was_replaced_hears_of_both_terms_and_does_not_end_the_run(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = world.launch("trainer")
    stands_by(world, monkeypatch)
    words = RoleOutcome("user_error", "term 1 is fenced", replaced=True)
    outcome = played(launched, lambda: world.ends.put_nowait(words))
    assert outcome.detail == "term 1 is fenced; term 2"
    assert world.told == []
    with pytest.raises(UserError, match="term 1 is fenced; term 2"):
        launched.result(outcome)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [("rollout", {}, "not for the rollout"), ("trainer", {"num_nodes": 2}, "--num-nodes is 2")],
)
def test_only_a_trainer_of_one_node_stands_by(
    world: World, kind: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"--standby is for a trainer on one node.*{words}"):
        world.launch(kind, standby=True, **options)
