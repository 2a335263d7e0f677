"""Evaluation beside training and after it, with a real model: what is written, and if it is so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.helpers.config import small_config

from ratchet import Run
from ratchet.observability.metrics import read_metrics
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.offline import evaluate_offline, find_model
from ratchet.storage.versions import read_versions

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("engines", [pytest.param("shared", marks=pytest.mark.soak), "own"])
def test_each_result_is_of_one_live_version_and_the_last_one_is_that_of_the_export(
    tmp_path: Path, engines: str
) -> None:
    config = small_config(
        trainer={"num_steps": 6},
        rollout={"num_workers": 2, "max_tokens": 5},
        eval={"num_prompts": 8, "every_steps": 2, "engines": engines},
    )
    with Run(config, directory=tmp_path / "run", in_process=True) as run:
        summary = run.wait(120)
    directory = RunDirectory(tmp_path / "run")
    assert summary["status"] == "finished"
    lines = read_metrics(directory.evals)
    live = {v.version: v for v in read_versions(directory.versions) if v.state == "live"}
    assert all(live[line["version"]].step == line["step"] for line in lines)
    assert [line["step"] for line in (lines[0], lines[-1])] == [0, 6]
    skipped = lines[-1]["num_skipped"]
    assert len(lines) + skipped == 4  # before, of steps 2 and 4, after
    assert all((line["num_prompts"], line["num_failed"]) == (8, 0) for line in lines)
    offline = asyncio.run(evaluate_offline(find_model(directory.root, None, ())))
    assert (offline.version, offline.step) == (lines[-1]["version"], 6)
    assert offline.accuracy == lines[-1]["accuracy"] == summary["eval_after"]["accuracy"]
