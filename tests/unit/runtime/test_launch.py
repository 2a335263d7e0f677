"""What a launcher makes of signals, of the end of its role, and of the end of the registry."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config
from tests.helpers.launched import make_token

from ratchet.errors import ActorDead, ConfigError, RunFailed, UserError
from ratchet.messages import EndRun, RunDescribed
from ratchet.runtime import launch as launch_module
from ratchet.runtime.launch import Launch
from ratchet.runtime.node_config import LaunchOptions
from ratchet.runtime.placement import Placement, RankSpec
from ratchet.runtime.registry_link import Gone
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.rundir import Links, read_links, write_links
from ratchet.status import RunStatus
from ratchet.types import VersionRecord

CONFIG = small_config()


class World:
    """A supervisor and a registry of the test's own."""

    def __init__(self, root: Path) -> None:
        self.live: VersionRecord | None = None
        self.root = root
        self.told: list[EndRun] = []
        self.said: list[str] = []
        self.placement: Placement | None = None
        self.config = CONFIG.to_toml()
        self.listens = True
        self.away = 0

    def launch(self, kind: Any, **options: Any) -> Launch:
        self.ends = asyncio.Queue[RoleOutcome]()  # a queue belongs to one loop
        self.gone = asyncio.Queue[Gone]()
        recipe = self.root / "job.toml"
        recipe.write_text(CONFIG.to_toml())
        token = self.root / "token"
        if not token.exists():
            make_token(token)
        given = {
            "registry": "127.0.0.1:7000",
            "directory": self.root / "node",
            "token_file": str(token),
            **options,
        }
        return Launch(kind, recipe, LaunchOptions(**given), self.said.append)

    # --- in the place of LocalSupervisor

    def supervisor(self, config: Any, run: Any, *, placement: Placement, log: Any) -> Any:
        self.placement = placement
        if placement.roles[0][0] == "registry" and self.listens:
            write_links(run, Links("tcp:127.0.0.1:7001", placement.run_id))
        return self

    async def run(self, stop: asyncio.Event, kill: asyncio.Event) -> RoleOutcome:
        killed = asyncio.ensure_future(kill.wait())
        ended = asyncio.ensure_future(self.ends.get())
        await asyncio.wait({killed, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return ended.result()
        return RoleOutcome("stopped", "interrupted")

    # --- in the place of a visit

    @contextlib.asynccontextmanager
    async def visit(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        yield self

    def end_run(self, message: EndRun) -> None:
        self.told.append(message)

    async def describe(self, timeout_s: float) -> RunDescribed:
        if self.away:
            self.away -= 1
            raise ActorDead("registry could not be reached")
        return await self.meet()

    async def meet(self, *args: Any, **kwargs: Any) -> RunDescribed:
        return RunDescribed("run-1", self.config, RunStatus("x", 1.0, 1, self.live, 0, 0, ()))

    async def until_gone(self, *args: Any, **kwargs: Any) -> Gone:
        return await self.gone.get()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(tmp_path)
    monkeypatch.setattr(launch_module, "LocalSupervisor", made.supervisor)
    monkeypatch.setattr(launch_module, "visit", made.visit)
    monkeypatch.setattr(launch_module, "meet_registry", made.meet)
    monkeypatch.setattr(launch_module, "until_gone", made.until_gone)
    monkeypatch.setattr(launch_module, "_OVER_S", 0.01)
    monkeypatch.setattr(launch_module, "_LAST_ROLE_S", 0.01)
    return made


def played(launched: Launch, act: Callable[[], Any]) -> RoleOutcome:
    """Run, let something happen, and return the outcome."""

    async def main() -> RoleOutcome:
        async with asyncio.timeout(15):
            running = asyncio.create_task(launched.run())
            await asyncio.sleep(0.05)
            act()
            return await running

    return asyncio.run(main())


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


# --- ends


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


# --- a standby


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
