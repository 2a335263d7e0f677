"""Mistakes of a user: one clear line, exit code 2, nothing written, no traceback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.config import small_config

from ratchet import cli


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(small_config().to_toml())
    return path


def command(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["ratchet", *args])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert isinstance(caught.value.code, int)
    return caught.value.code


def bad_model(tmp_path: Path) -> str:
    (tmp_path / "empty").mkdir()
    return str(tmp_path / "empty")


TASK = """
class Bad:
    def __init__(self):
        raise RuntimeError("no data today")
"""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.group_siz=3"], ["rollout.group_siz", "did you mean 'group_size'"]),
        (["trainer.num_steps='ten'"], ["trainer.num_steps = 'ten'", "integer"]),
        (["rollout.group_size=1"], ["group_size = 1", "std"]),
        (["buffer.filters=['math:nothing']"], ["buffer.filters", "math:nothing"]),
        (["buffer.unused='math:nothing'"], ["buffer.unused", "math:nothing"]),
        (["buffer.capacity_factor=0.2"], ["can never hold a batch"]),
        (["weights.pause_mode=abort"], ["abort", "in_place", "retract"]),
        (["runtime.host=192.168.0.1"], ["192.168.0.1", "127.0.0.1"]),
        (["rollout.backend=vllm"], ["rollout.backend = 'vllm'", "torch"]),
        (["algorithm.advantage=best"], ["algorithm.advantage = 'best'", "mean", "std"]),
        (["weights.transport=pigeon"], ["weights.transport = 'pigeon'", "broadcast"]),
        (["task.name=cpoy"], ["task.name = 'cpoy'", "copy"]),
        (["task.name='nowhere:Task'"], ["nowhere", "task.name"]),
        (["task.name='{tmp}/task.py:Bad'", "task.args={}"], ["task.py:Bad", "no data today"]),
        (["task.name='{tmp}/task.py:Missing'"], ["Missing"]),
        (["task.name=jsonl", "task.args={path='{tmp}/no.jsonl'}"], ["no.jsonl"]),
        (["task.reward='math:nothing'"], ["task.reward", "math:nothing"]),
        (["model.tokenizer_chars='01'"], ["outside model.tokenizer_chars"]),
        (["rollout.max_tokens=64"], ["max_tokens = 64", "longer than the model's context of 64"]),
        (["eval.num_prompts=100000"], ["eval.num_prompts = 100000"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_mistake_is_explained_and_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    recipe: Path,
    overrides: list[str],
    words: list[str],
) -> None:
    tmp = recipe.parent
    (tmp / "task.py").write_text(TASK)
    target = tmp / "target"
    sets = [arg for o in overrides for arg in ("--set", o.replace("{tmp}", str(tmp)))]
    assert command(monkeypatch, "run", str(recipe), "--dir", str(target), *sets) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    assert all(word in captured.err for word in words), captured.err
    assert not target.exists()


def test_an_existing_run_is_never_written_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path
) -> None:
    target = recipe.parent / "target"
    target.mkdir()
    (target / "metrics.jsonl").write_text("precious")
    assert command(monkeypatch, "run", str(recipe), "--dir", str(target)) == 2
    assert "exists already" in capsys.readouterr().err
    assert [p.name for p in target.iterdir()] == ["metrics.jsonl"]
    assert (target / "metrics.jsonl").read_text() == "precious"


def test_a_missing_recipe_or_model_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command(monkeypatch, "run", str(tmp_path / "no.toml")) == 2
    assert "no.toml: No such file" in capsys.readouterr().err
    config = small_config().model_dump(mode="json", exclude_none=True)
    config["model"] = {"path": bad_model(tmp_path)}
    path = tmp_path / "pretrained.toml"
    import tomli_w

    path.write_text(tomli_w.dumps(config))
    assert command(monkeypatch, "check", str(path)) == 2
    assert "model.path" in capsys.readouterr().err


def test_check_prints_the_resolved_configuration(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], recipe: Path
) -> None:
    assert command(monkeypatch, "check", str(recipe), "--set", "seed=5") == 0
    printed = capsys.readouterr().out
    assert "seed = 5" in printed
    assert "max_staleness = 4" in printed
    assert re.search(r'^fingerprint = "[0-9a-f]{32}"$', printed, re.MULTILINE)


LIGHT = """
import json, sys
import {module}
print(json.dumps(sorted(m for m in sys.modules if m.split(".")[0] in {heavy})))
"""


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("ratchet", ["torch", "transformers", "numpy", "pydantic", "pykka", "rich"]),
        ("ratchet.cli", ["torch", "transformers"]),
        ("ratchet.runtime.run", ["torch", "transformers"]),
        ("ratchet.actors.buffer", ["torch", "transformers"]),
        ("ratchet.actors.version_registry", ["torch", "transformers"]),
    ],
)
def test_light_layers_stay_light(module: str, heavy: list[str]) -> None:
    code = LIGHT.format(module=module, heavy=heavy)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert json.loads(done.stdout) == []


def test_help_is_light() -> None:
    code = (
        "import sys; sys.argv = ['ratchet', '--help']\n"
        "from ratchet import cli\n"
        "try: cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("run", "check", "logs", "versions", "groups"):
        assert name in done.stdout
