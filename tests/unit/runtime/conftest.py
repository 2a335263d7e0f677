from __future__ import annotations

import pytest
from tests.helpers.scripted_supervisor import Supervisor

from ratchet.runtime import one_host


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> type[Supervisor]:
    monkeypatch.setattr(one_host, "LocalSupervisor", Supervisor)
    monkeypatch.setattr(Supervisor, "outcome", None)
    monkeypatch.setattr(Supervisor, "seen", staticmethod(lambda _: None))
    return Supervisor
