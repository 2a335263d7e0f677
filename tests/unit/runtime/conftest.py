"""Fixtures of several suites. What loads torch is imported where it is used: few tests need it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.helpers.launch_world import World
from tests.helpers.scripted_supervisor import Supervisor

from ratchet.runtime import launch as launch_module
from ratchet.runtime import one_host

if TYPE_CHECKING:
    from tests.helpers.mini_run import MiniRun


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> type[Supervisor]:
    monkeypatch.setattr(one_host, "LocalSupervisor", Supervisor)
    monkeypatch.setattr(Supervisor, "outcome", None)
    monkeypatch.setattr(Supervisor, "seen", staticmethod(lambda _: None))
    return Supervisor


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


@pytest.fixture
def mini(tmp_path: Path) -> Iterator[MiniRun]:
    from tests.helpers.mini_run import MiniRun

    with MiniRun(tmp_path) as run:
        yield run
