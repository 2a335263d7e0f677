"""A run as processes of one host: its secret, its roles, and what guests hear."""

from __future__ import annotations

import asyncio
import stat
import tempfile
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.helpers.config import small_config
from tests.helpers.launched import make_token

from ratchet import Run
from ratchet.errors import ActorDead, ConfigError, RunFailed
from ratchet.messages import EndRun
from ratchet.runtime import one_host
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.rundir import Links, write_links
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import load_token

if TYPE_CHECKING:
    from tests.helpers.scripted_supervisor import Supervisor


def test_the_secret_of_a_run_is_a_private_file_that_goes_with_it(
    tmp_path: Path, supervisor: type[Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[bytes] = []
    run = Run(small_config(), directory=tmp_path / "run")

    def look(here: Supervisor) -> None:
        token_file = here.placement.token_file
        assert token_file is not None
        assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(token_file.parent.stat().st_mode) == 0o700
        keys.append(load_token(str(token_file)))
        write_links(run.directory, Links("unix:/x", run.run_id, str(token_file)))

    monkeypatch.setattr(supervisor, "seen", staticmethod(look))
    monkeypatch.setattr(supervisor, "outcome", RoleOutcome("stopped"))
    asyncio.run(run.run())
    placement = supervisor.placement
    assert keys == [placement.key]
    assert placement.token_file is not None
    assert not placement.token_file.parent.exists()
    assert not run.directory.links.exists()
    assert placement.config == run.config.to_toml()


@pytest.mark.parametrize(("num_bytes", "is_used"), [(45, True), (46, False), (200, False)])
def test_sockets_have_paths_that_the_system_takes(
    num_bytes: int,
    is_used: bool,
    supervisor: type[Supervisor],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def look(here: Supervisor) -> None:
        folder = here.placement.sockets
        assert (folder.parent == Path(root)) is is_used
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        Address.parse(f"unix:{folder / 'rollout-9999.sock'}")  # which raises if it is too long

    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        root = f"{short}/".ljust(num_bytes, "x")
        Path(root).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", root)
        monkeypatch.setattr(supervisor, "seen", staticmethod(look))
        monkeypatch.setattr(supervisor, "outcome", RoleOutcome("stopped"))
        asyncio.run(Run(small_config(), directory=tmp_path / "run").run())
    assert supervisor.placement.sockets.name.startswith("ratchet-run-")


def test_a_secret_of_the_users_own_is_used_and_stays(
    tmp_path: Path, supervisor: type[Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = make_token(tmp_path / "token")
    monkeypatch.setattr(supervisor, "outcome", RoleOutcome("stopped"))
    config = small_config(runtime={"token_file": str(token)})
    asyncio.run(Run(config, directory=tmp_path / "run").run())
    assert supervisor.placement.token_file == token
    assert supervisor.placement.key == load_token(str(token))
    assert token.exists()
    token.chmod(0o644)
    with pytest.raises(ConfigError, match="token_file"):
        Run(config, directory=tmp_path / "open")
    assert not (tmp_path / "open").exists()


@pytest.mark.parametrize(
    ("roles", "names"),
    [
        (None, ["registry", "buffer", "trainer-0", "rollout-0"]),
        ({"rollout", "registry", "buffer"}, ["registry", "buffer", "rollout-0"]),
        (("registry", "buffer", "trainer"), ["registry", "buffer", "trainer-0"]),
    ],
)
def test_some_of_the_roles_may_be_a_users_own(
    tmp_path: Path,
    supervisor: type[Supervisor],
    monkeypatch: pytest.MonkeyPatch,
    roles: Any,
    names: list[str],
) -> None:
    monkeypatch.setattr(supervisor, "outcome", RoleOutcome("finished"))
    asyncio.run(Run(small_config(), directory=tmp_path / "run", roles=roles).run())
    assert [name for _, name in supervisor.placement.roles] == names


@pytest.mark.parametrize(
    ("roles", "in_process"),
    [(["buffer"], False), (["registry", "producer"], False), (["registry"], True)],
)
def test_roles_that_cannot_be_started_alone_are_refused(
    tmp_path: Path, roles: Collection[Any], in_process: bool
) -> None:
    with pytest.raises(ConfigError, match=r"roles = .*the registry among them"):
        Run(small_config(), directory=tmp_path / "run", roles=roles, in_process=in_process)
    assert not (tmp_path / "run").exists()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[EndRun]:
    """What the registry of a run is told by its launcher."""
    messages: list[EndRun] = []

    class Link:
        async def describe(self, timeout_s: float) -> None:
            pass

        def end_run(self, message: EndRun) -> None:
            messages.append(message)

    @asynccontextmanager
    async def visit(*args: Any, **kwargs: Any) -> AsyncIterator[Link]:
        yield Link()

    monkeypatch.setattr(one_host, "visit", visit)
    monkeypatch.setattr(one_host, "_LEAVE_S", 0.01)
    return messages


def test_a_stop_without_a_trainer_of_ours_reaches_everyone_through_the_registry(
    tmp_path: Path, supervisor: type[Supervisor], told: list[EndRun]
) -> None:
    with Run(small_config(), directory=tmp_path / "run", roles=("registry", "buffer")) as run:
        run.stop()
        assert run.wait(30)["reason"] == "kill"  # who has not left by then is ended
    assert [(message.status, message.reason) for message in told] == [("stopped", "asked to stop")]


def test_a_registry_that_cannot_be_told_of_a_stop_does_not_keep_the_run(
    tmp_path: Path, supervisor: type[Supervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def visit(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        raise ActorDead("registry has not started")
        yield

    monkeypatch.setattr(one_host, "visit", visit)
    run = Run(small_config(), directory=tmp_path / "run", roles=("registry", "buffer")).start()
    run.stop()
    with pytest.raises(ActorDead, match="has not started"):
        run.wait(30)


def test_guests_hear_why_a_run_has_failed_and_so_does_its_user(
    tmp_path: Path,
    supervisor: type[Supervisor],
    monkeypatch: pytest.MonkeyPatch,
    told: list[EndRun],
) -> None:
    async def run(self: Supervisor, *_: Any) -> RoleOutcome:
        await self.on_escalation("buffer died")
        return RoleOutcome("failed", "buffer died")

    monkeypatch.setattr(supervisor, "run", run)
    with (
        pytest.raises(RunFailed, match="buffer died"),
        Run(small_config(), directory=tmp_path / "run") as failing,
    ):
        failing.wait(30)
    assert [(message.status, message.reason) for message in told] == [("failed", "buffer died")]
