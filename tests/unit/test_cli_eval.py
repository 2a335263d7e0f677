"""The command: what it hands on, what it prints, and its exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config

from ratchet import cli
from ratchet.errors import RunFailed, UserError
from ratchet.runtime import offline
from ratchet.runtime.offline import ModelToEvaluate, OfflineEvaluation

FOUND = OfflineEvaluation(
    model="/m", version=14, digest="d1", step=12, task="mixture", accuracy=0.5, num_prompts=6,
    num_failed=2, samples=1, temperature=0.0, seconds=1.5,
    tasks={"copy": {"accuracy": 0.25, "num_prompts": 4}}, first_failure="prompt copy/1: no",
)  # fmt: skip


class Fake:
    """In the place of what evaluates."""

    def __init__(self, result: OfflineEvaluation | BaseException) -> None:
        self.result = result
        self.asked: tuple[Any, ...] = ()

    def find(self, *args: Any) -> ModelToEvaluate:
        self.asked = args
        return ModelToEvaluate(Path("/m"), None, small_config())

    async def evaluate(self, model: ModelToEvaluate) -> OfflineEvaluation:
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def command(monkeypatch: pytest.MonkeyPatch, fake: Fake, *args: str) -> int:
    monkeypatch.setattr(offline, "find_model", fake.find)
    monkeypatch.setattr(offline, "evaluate_offline", fake.evaluate)
    monkeypatch.setattr(sys, "argv", ["ratchet", "eval", *args])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


def test_a_table_for_people(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake(FOUND)
    args = ("/m", "--config", "job.toml", "--set", "eval.samples=2", "--set", "seed=1")
    assert command(monkeypatch, fake, *args) == 0
    assert fake.asked == (Path("/m"), Path("job.toml"), ["eval.samples=2", "seed=1"])
    words = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert words == [
        "model /m", "version 14 (step 12)", "digest d1", "task mixture",
        "prompts 6 scored, 2 failed", "sampling 1 per prompt, temperature 0", "accuracy 0.5000",
        "copy 0.2500 on 4", "seconds 1.5", "first failure prompt copy/1: no",
    ]  # fmt: skip


def test_an_object_for_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(monkeypatch, Fake(FOUND), "/m", "--json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["tasks"] == {"copy": {"accuracy": 0.25, "num_prompts": 4}}


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("no such task"), 2, "error: no such task\n"),
        (RunFailed("nothing was scored"), 1, "the run failed: nothing was scored\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_how_it_ends(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    words: str,
) -> None:
    assert command(monkeypatch, Fake(error), "/m") == code
    assert capsys.readouterr() == ("", words)
