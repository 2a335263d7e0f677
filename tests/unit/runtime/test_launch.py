"""What a launcher starts: the name of its role, mistakes found first, and the run that it joins."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.helpers.config import small_config
from tests.helpers.launch_world import World, played

from ratchet.errors import ConfigError, UserError
from ratchet.runtime import launch as launch_module
from ratchet.runtime.placement import RankSpec
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.rundir import Links, read_links
from ratchet.types import VersionRecord

# --- what it is

OWN = ["eval.num_prompts=2", "eval.every_steps=1", "eval.engines=own"]


@pytest.mark.parametrize(
    ("kind", "options", "name", "ranks"),
    [
        ("registry", {}, "registry", None),
        ("buffer", {"node_rank": 3}, "buffer", None),
        ("rollout", {"node_rank": 3}, "rollout-3", None),
        ("evaluator", {"node_rank": 2, "overrides": OWN}, "evaluator-2", None),
        ("trainer", {}, "trainer-0", None),
        ("trainer", {"overrides": ["trainer.ranks_per_node=2"]}, "trainer-0", RankSpec(2)),
        (
            "trainer",
            {"num_nodes": 2, "node_rank": 1, "rendezvous": "a:1"},
            "trainer-1",
            RankSpec(1, 2, 1, "a:1"),
        ),
    ],
)
def test_each_role_has_a_name(
    world: World, kind: Any, options: dict[str, Any], name: str, ranks: RankSpec | None
) -> None:
    launched = world.launch(kind, **options)
    assert (launched.name, launched._placement("x").ranks) == (name, ranks)


def test_a_rollout_without_a_number_finds_itself_a_new_one(world: World) -> None:
    names = {world.launch("rollout").name for _ in range(5)}
    assert len(names) == 5
    assert all(name.removeprefix("rollout-").isdecimal() for name in names)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("rollout", {"num_nodes": 2}, "--num-nodes and --rendezvous are for the trainer"),
        ("buffer", {"rendezvous": "a:1"}, "--num-nodes and --rendezvous are for the trainer"),
        ("trainer", {"num_nodes": 2, "node_rank": 0}, "--num-nodes 2 needs --rendezvous"),
        ("trainer", {"num_nodes": 2, "rendezvous": "a:1"}, "--node-rank from 0 to 1"),
        ("trainer", {"num_nodes": 2, "rendezvous": "a:1", "node_rank": 2}, "from 0 to 1"),
        ("evaluator", {}, "--eval starts a worker that only evaluates, and eval.every_steps = 0"),
        ("evaluator", {"overrides": OWN[:2]}, "eval.engines = 'shared'"),
        ("buffer", {"token_file": "/no/such"}, "runtime.token_file"),
        ("rollout", {"overrides": ["rollout.backend=x"]}, "rollout.backend"),
        ("buffer", {"overrides": ["task.name=x"]}, "task"),
        ("rollout", {"overrides": ["rollout.max_tokens=64"]}, "longer than the model's context"),
    ],
)
def test_a_mistake_is_found_before_anything_is_written(
    world: World, kind: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        world.launch(kind, **options)
    assert not (world.root / "node").exists()


def test_a_registry_needs_no_model_and_no_task(world: World) -> None:
    world.launch("registry", overrides=["task.name=x", "rollout.max_tokens=64"])


# --- joining


def test_a_role_joins_the_run_that_the_registry_has(world: World) -> None:
    launched = world.launch("rollout", node_rank=3)
    played(launched, lambda: world.ends.put_nowait(RoleOutcome("finished", "3 steps")))
    assert world.placement is not None
    assert world.placement.run_id == "run-1"
    assert world.placement.roles == (("rollout", "rollout-3"),)
    links = read_links(launched.directory)
    assert links == Links("tcp:127.0.0.1:7000", "run-1", str(world.root / "token"))
    assert "rollout-3 joins run run-1" in world.said[0]


def test_another_configuration_does_not_join(world: World) -> None:
    world.config = small_config(trainer={"num_steps": 9}).to_toml()
    with pytest.raises(ConfigError, match=r"trainer\.num_steps is 3 here and 9 there"):
        played(world.launch("buffer"), lambda: None)
    assert not (world.root / "node").exists()


def test_a_buffer_of_a_trained_run_begins_no_second_ledger(world: World) -> None:
    for world.live in (None, VersionRecord(0, 1, 0, None, "live")):
        launched = world.launch("buffer")
        played(launched, launched.request_stop)
    world.live = VersionRecord(3, 1, 2, 2, "live")
    with pytest.raises(ConfigError, match=r"trained already, and .*node has nothing of that"):
        asyncio.run(world.launch("buffer").run())
    played(world.launch("trainer"), lambda: world.ends.put_nowait(RoleOutcome("finished")))


def test_a_signal_ends_the_wait_for_a_registry(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*args: Any, **kwargs: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(launch_module, "meet_registry", never)
    launched = world.launch("buffer")
    assert played(launched, launched.request_stop).status == "stopped"
    assert not (world.root / "node").exists()


def test_a_registry_says_where_it_listens_and_keeps_its_run(world: World) -> None:
    launched = world.launch("registry")
    played(launched, lambda: world.ends.put_nowait(RoleOutcome("finished")))
    assert world.said == ["registry listens at tcp:127.0.0.1:7001"]
    assert world.placement is not None
    first = world.placement.run_id
    played(world.launch("registry"), lambda: world.ends.put_nowait(RoleOutcome("finished")))
    assert world.placement.run_id == first


def test_a_registry_that_ends_before_it_listens_is_not_waited_for(world: World) -> None:
    world.listens = False
    refused = RoleOutcome("user_error", "address tcp:127.0.0.1:7000 cannot be bound")
    assert played(world.launch("registry"), lambda: world.ends.put_nowait(refused)) == refused
    launched = world.launch("registry")
    assert played(launched, launched.request_stop).status == "stopped"
