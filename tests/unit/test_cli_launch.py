"""The command: what it hands on, and its exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config

from ratchet import cli
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime import launch as launch_module
from ratchet.runtime.launch import Launch
from ratchet.runtime.node_config import LaunchOptions
from ratchet.runtime.role import RoleOutcome


class Fake:
    """In the place of `Launch`: ends as told, or when it is stopped."""

    outcome: RoleOutcome | None = None
    made: tuple[Any, ...] = ()
    result = Launch.result
    name = "rollout-3"

    def __init__(
        self, kind: str, config: Path, options: LaunchOptions, say: Callable[[str], None]
    ) -> None:
        type(self).made = (kind, config, options)
        self.kind = kind
        self.config = small_config()
        self.directory = RunDirectory(Path("/nowhere"))
        self._stop = asyncio.Event()
        say("it begins")

    def request_stop(self) -> None:
        self._stop.set()

    async def run(self) -> RoleOutcome:
        if self.outcome is not None:
            return self.outcome
        os.kill(os.getpid(), signal.SIGTERM)
        await self._stop.wait()
        return RoleOutcome("stopped")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[Fake]:
    monkeypatch.setattr(launch_module, "Launch", Fake)
    monkeypatch.setattr(Fake, "outcome", None)
    return Fake


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ratchet", "launch", *args])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_every_option_is_handed_on(fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    fake.outcome = RoleOutcome("finished")
    options = {
        "--registry": "head:7000", "--node-rank": "1", "--host": "10.0.0.2", "--dir": "d",
        "--token-file": "t", "--tls-ca": "ca", "--tls-cert": "cert", "--tls-key": "key",
        "--num-nodes": "2", "--rendezvous": "head:7001", "--wait": "9.5", "--set": "a.b=1",
    }  # fmt: skip
    assert (
        command(monkeypatch, "trainer", "job.toml", *[t for o in options.items() for t in o]) == 0
    )
    assert fake.made == (
        "trainer",
        Path("job.toml"),
        LaunchOptions(
            registry="head:7000",
            node_rank=1,
            host="10.0.0.2",
            directory=Path("d"),
            token_file="t",
            tls={"ca": "ca", "cert": "cert", "key": "key"},
            overrides=["a.b=1"],
            num_nodes=2,
            rendezvous="head:7001",
            wait_s=9.5,
        ),
    )


def test_a_rollout_may_only_evaluate(fake: type[Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    fake.outcome = RoleOutcome("finished")
    assert command(monkeypatch, "rollout", "job.toml", "--registry", "a:1", "--eval") == 0
    assert fake.made[0] == "evaluator"


@pytest.mark.parametrize(
    ("status", "code", "last"),
    [
        ("finished", 0, "rollout-3: the run has ended: why"),
        ("failed", 1, "the run failed: why"),
        ("run_failed", 1, "the run failed: why"),
        ("user_error", 2, "error: why"),
    ],
)
def test_the_exit_code_and_the_last_line_tell_how_it_ended(
    fake: type[Fake],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    status: str,
    code: int,
    last: str,
) -> None:
    fake.outcome = RoleOutcome(status, "why")
    assert command(monkeypatch, "rollout", "job.toml", "--registry", "a:1") == code
    out, err = capsys.readouterr()
    assert (out + err).splitlines() == ["it begins", last]


def test_a_signal_is_an_exit_code_of_its_own(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command(monkeypatch, "rollout", "job.toml", "--registry", "a:1") == 143


@pytest.mark.parametrize(
    "args",
    [
        ("producer", "job.toml", "--registry", "a:1"),
        ("buffer", "job.toml"),
        ("buffer", "job.toml", "--registry", "a:1", "--eval"),
        ("buffer", "job.toml", "--registry", "a:1", "--node-rank", "-1"),
    ],
)
def test_what_it_does_not_know_is_a_mistake(
    fake: type[Fake], monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    assert command(monkeypatch, *args) == 2
