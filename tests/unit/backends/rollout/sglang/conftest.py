"""Pauses between two tries are short here: nothing on this machine needs the time."""

from __future__ import annotations

import pytest

from ratchet.backends.rollout.sglang import fleet, http, server


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "_AGAIN_S", 0.02)
    monkeypatch.setattr(http, "_BACKOFF_S", 0.01)
    monkeypatch.setattr(server, "_LOOK_S", 0.05)
