"""`ratchet launch`: the roles of a run, each by its own launcher, over TCP."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.command import gone, json_lines, kill
from tests.helpers.launched import Launched, Site, make_token, ratchet
from tests.helpers.light_run import light_config

from ratchet.messages import StopTraining
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.rundir import read_links
from ratchet.runtime.visitor import visit
from ratchet.storage.versions import read_versions
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import load_token

pytestmark = pytest.mark.timeout(240)

CONFIG = light_config(
    rollout={"max_tokens": 5, "group_size": 4, "num_workers": 2},
    trainer={"num_steps": 100_000, "lr": 1e-3},
)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with Site(tmp_path, CONFIG) as made:
        yield made


def loads(launched: Launched, name: str) -> list[int]:
    """The pid of each load of weights."""
    return [event["pid"] for event in launched.events(name, "weights_loaded")]


def finished_by(buffer: Launched) -> set[str]:
    """The workers whose groups the buffer has taken."""
    with sqlite3.connect(f"file:{buffer.directory}/ledger.sqlite?mode=ro", uri=True) as ledger:
        rows = ledger.execute("SELECT DISTINCT worker FROM groups WHERE finished_at NOT NULL")
        return {row[0] for row in rows}


def stop_training(site: Site) -> None:
    """What `Run.stop` tells its trainer, told by a visitor."""

    async def main() -> None:
        address = Address.parse(f"tcp:{site.registry}")
        key = load_token(str(site.token_file))
        async with visit(address, key=key, log=RecordingLog()) as link:
            described = await link.describe(10.0)
            (trainer,) = [r.role for r in described.status.roles if r.role.kind == "trainer"]
            link.system.book.learn(trainer.name, trainer.address)
            link.system.ref(trainer.name).tell(StopTraining("enough"))

    asyncio.run(main())


def test_a_run_of_launched_roles_trains_while_rollouts_come_and_go(site: Site) -> None:
    registry = site.launch("registry")
    buffer, trainer = site.launch("buffer"), site.launch("trainer")
    first = site.launch("rollout", "--node-rank", "0", name="r0")
    second = site.launch("rollout", "--node-rank", "1", name="r1")

    def steps() -> int:
        return len(json_lines(trainer.directory / "metrics.jsonl"))

    trainer.until("a second step", lambda: steps() >= 2)
    third = site.launch("rollout", name="r2")  # it finds itself a name
    name = third.until("its name", lambda: third.said("joins run")).split()[0]

    # kill -9 of a role: its own launcher heals it
    victim = first.child("rollout-0")
    kill(victim)
    first.until("a new life", lambda: first.child("rollout-0") != victim)

    # SIGTERM of a launcher: it leaves in order, and the run goes on
    second.until("weights", lambda: loads(second, "rollout-1"))
    family = second.family()
    kill(second.process.pid, signal.SIGTERM)
    assert second.finish(10.0) == 128 + signal.SIGTERM, second.output
    assert gone(family[1:], 1.0) == []
    (left,) = [e for e in registry.events("registry-0", "role_left") if e["name"] == "rollout-1"]
    assert left["reason"] == "stopped"

    third.until("weights", lambda: loads(third, name))
    first.until("weights", lambda: first.child("rollout-0") in loads(first, "rollout-0"))
    buffer.until("groups of the one that came later", lambda: name in finished_by(buffer))
    before = steps()
    trainer.until("more steps", lambda: steps() >= before + 5)

    stop_training(site)
    codes = {each.directory.name: each.finish(20.0) for each in site.launched if each != second}
    assert set(codes.values()) == {0}, [each.output for each in site.launched]
    assert all("the run has ended: enough" in e.last_line for e in site.launched if e != second)
    assert (trainer.directory / "model" / "weights.json").exists()
    versions = list(read_versions(registry.directory / "versions.sqlite"))
    assert [v.version for v in versions] == list(range(len(versions)))
    assert {name, "rollout-0"} <= finished_by(buffer)
    # no file of one role is in the directory of another
    assert not (trainer.directory / "versions.sqlite").exists()
    assert not (registry.directory / "ledger.sqlite").exists()
    token = site.token_file.read_text()
    assert all(token not in path.read_text() for path in site.root.glob("**/*.jsonl"))


def test_another_configuration_and_a_wrong_token_are_refused_at_once(site: Site) -> None:
    site.launch("registry")
    started = time.monotonic()
    other = site.launch("buffer", "--set", "buffer.batch_groups=3", name="other")
    wrong = site.launch("buffer", "--token-file", str(make_token(site.root / "wrong")), name="no")
    assert (other.finish(30), wrong.finish(30)) == (2, 2)
    assert time.monotonic() - started < 30
    assert "buffer.batch_groups is 3 here and 4 there" in other.output
    assert "do not hold the same key" in wrong.last_line
    assert "--token-file" in wrong.last_line
    assert not other.directory.exists()
    assert not wrong.directory.exists()
    # what is local to a node may differ, and the run was not harmed
    same = site.launch("buffer", "--set", "runtime.threads=2", "--set", "name=mine")
    same.until("its place", lambda: same.said("joins run"))


def test_nobody_opens_a_door_to_strangers(site: Site) -> None:
    job, there = str(site.recipe), str(site.root / "x")
    for args in (
        ["launch", "registry", job, "--registry", "10.1.2.3:7000", "--dir", there],
        ["launch", "rollout", job, "--registry", "10.1.2.3:7000", "--dir", there],
        ["launch", "buffer", job, "--registry", "127.0.0.1:7000", "--host", "10.1.2.3"],
        ["run", job, "--set", "runtime.host=10.1.2.3", "--dir", there],
    ):
        code, output = ratchet(*args)
        assert code == 2, output
        assert "10.1.2.3" in output
        assert "token" in output
        assert "127.0.0.1" in output
    assert not Path(there).exists()


def test_a_registry_that_never_comes_is_waited_for_and_named(site: Site) -> None:
    launched = site.launch("buffer", "--registry", "127.0.0.1:9", "--wait", "2")
    assert launched.finish(30) == 1
    assert launched.said("waiting for the registry at tcp:127.0.0.1:9, up to 2 s")
    assert launched.last_line.startswith(
        "the run failed: the registry at tcp:127.0.0.1:9 could not"
    )
    assert not launched.directory.exists()


def test_of_two_with_one_name_the_newer_stays_and_the_older_ends(site: Site) -> None:
    registry = site.launch("registry")
    older = site.launch("buffer", name="older")
    older.until("its place", lambda: older.events("buffer-0", "link_open"))
    registry.until("the first", lambda: registry.events("registry-0", "role_joined"))
    newer = site.launch("buffer", name="newer")
    assert older.finish(40) == 2, older.output
    assert "a newer process has taken the name buffer, and this one ends" in older.last_line
    assert len(older.events("launcher-buffer", "process_started")) == 1  # it did not fight
    kill(registry.process.pid, signal.SIGTERM)
    assert newer.finish(15) == 0, newer.output
    assert "was told to stop" in newer.last_line
    assert registry.finish(15) == 128 + signal.SIGTERM
    assert len(registry.events("registry-0", "role_joined")) == 2


def test_a_launcher_that_gives_up_ends_the_run_everywhere_with_the_cause(site: Site) -> None:
    registry, buffer = site.launch("registry"), site.launch("buffer")
    registry.until("the buffer", lambda: registry.events("registry-0", "role_joined"))
    victim = None
    for _ in range(1 + CONFIG.runtime.max_restarts):
        buffer.until("a life", lambda before=victim: buffer.child("buffer") != before)
        victim = buffer.child("buffer")
        kill(victim)
    assert (buffer.finish(20), registry.finish(20)) == (1, 1)
    for launched in (buffer, registry):
        assert launched.last_line.startswith("the run failed: buffer"), launched.output
        assert "signal 9" in launched.last_line


def test_a_registry_goes_on_with_its_run_where_it_was_killed(site: Site) -> None:
    registry = site.launch("registry")
    site.registry = "127.0.0.1:0"  # any port, again and again
    links = read_links(RunDirectory(registry.directory))
    victim = registry.child("registry")
    kill(victim)
    registry.until("a new life", lambda: registry.child("registry") != victim)
    registry.until("its place", lambda: len(registry.events("registry-0", "node_started")) == 2)
    family = registry.family()
    kill(registry.process.pid)
    registry.finish()
    assert gone(family[1:], 10.0) == []
    again = site.launch("registry")
    assert again.directory == registry.directory
    found = read_links(RunDirectory(again.directory))
    assert links is not None
    assert found is not None
    assert found == links
