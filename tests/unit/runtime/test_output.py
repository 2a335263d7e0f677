from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ratchet.backends.training.fake import FakeBackend
from ratchet.observability.metrics import read_metrics
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.output import RunOutput


def test_metrics_are_appended_line_by_line(tmp_path: Path) -> None:
    output = RunOutput(RunDirectory(tmp_path))
    output.step({"step": 1, "loss": 0.5})
    output.step({"step": 2, "loss": float("nan")})
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])


def test_a_summary_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path)
    output = RunOutput(run)
    output.summary({"status": "failed", "reason": "first", "steps": 1})
    seen: list[str] = []

    def crash(self: Path, target: Path) -> Path:
        seen.append(json.loads(self.read_text())["reason"])  # whole before it takes the name
        assert json.loads(target.read_text())["reason"] == "first"
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match="disk"):
            output.summary({"status": "failed", "reason": "second", "steps": 2})
    assert seen == ["second"]
    assert json.loads(run.summary.read_text())["reason"] == "first"
    output.summary({"status": "finished", "reason": None, "steps": 3})
    assert json.loads(run.summary.read_text()) == {
        "status": "finished", "reason": None, "steps": 3,
    }  # fmt: skip


def test_the_model_is_exported_to_its_place(tmp_path: Path) -> None:
    async def main() -> None:
        backend = FakeBackend()
        await backend.start()
        await RunOutput(RunDirectory(tmp_path)).model(backend)

    asyncio.run(main())
    assert (tmp_path / "model" / "weights.json").exists()
