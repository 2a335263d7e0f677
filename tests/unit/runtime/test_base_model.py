from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config

from ratchet.backends import models
from ratchet.config import parse_config
from ratchet.errors import ConfigError
from ratchet.runtime.base_model import ensure_base_model

ROOT = Path(__file__).parents[3]


def digest(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def test_a_model_is_built_from_the_seed_and_then_kept(tmp_path: Path) -> None:
    config = small_config()
    base = ensure_base_model(config, tmp_path / "base")
    assert base == tmp_path / "base"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in base.iterdir()
    }
    first = digest(base)
    other = ensure_base_model(config.model_copy(update={"seed": 1}), tmp_path / "base")
    assert digest(other) == first  # it was there
    assert digest(ensure_base_model(config, tmp_path / "again")) == first
    config = config.model_copy(update={"seed": 1})
    assert digest(ensure_base_model(config, tmp_path / "third")) != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "base", "third"]


def test_two_callers_at_once_get_one_model_and_leave_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2, timeout=60)
    write = models.save_model_directory

    def slowly(*args: Any) -> None:
        together.wait()  # both have seen that there is no model, and write at the same time
        write(*args)
        together.wait()

    monkeypatch.setattr(models, "save_model_directory", slowly)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(ensure_base_model, small_config(), tmp_path / "base") for _ in "12"]
        assert [call.result() for call in calls] == [tmp_path / "base"] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
    assert json.loads((tmp_path / "base" / "config.json").read_text())["model_type"] == "qwen3"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    config = small_config(model={"build": {"model_type": "no-such-model"}})
    with pytest.raises(ConfigError, match="no-such-model"):
        ensure_base_model(config, tmp_path / "base")
    assert list(tmp_path.iterdir()) == []


def test_a_model_of_the_users_own_is_left_where_it_is(tmp_path: Path) -> None:
    data = json.loads(small_config().model_dump_json(exclude_none=True))
    data["model"] = {"path": str(tmp_path / "mine")}
    assert ensure_base_model(parse_config(data), tmp_path / "base") == tmp_path / "mine"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_loads_no_transformers(tmp_path: Path) -> None:
    script = f"""
import pathlib, sys
from tests.helpers.light_run import light_config
from ratchet.runtime.base_model import ensure_base_model
ensure_base_model(light_config(), pathlib.Path({str(tmp_path)!r}) / "base")
print(*({{"torch", "transformers"}} & sys.modules.keys()))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True, text=True
    )
    assert done.stdout == "\n"
