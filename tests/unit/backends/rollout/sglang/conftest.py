"""Pauses between two tries are short here: nothing on this machine needs the time. And the
directory of the model that servers are compared with.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ratchet.backends.rollout.sglang import attach, fleet, http, server


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attach, "_AGAIN_S", 0.02)
    monkeypatch.setattr(fleet, "_AGAIN_S", 0.02)
    monkeypatch.setattr(http, "_BACKOFF_S", 0.01)
    monkeypatch.setattr(server, "_LOOK_S", 0.05)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    return tmp_path
