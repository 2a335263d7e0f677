from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config

from ratchet.backends.models import build_model, char_tokenizer, save_model_directory
from ratchet.config import Config
from ratchet.errors import RewardFailed, RunFailed, UserError
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime import offline
from ratchet.runtime.offline import ModelToEvaluate, evaluate_offline, find_model
from ratchet.storage.versions import VersionStore
from ratchet.types import VersionRecord


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights."""
    config = small_config()
    assert config.model.build is not None
    assert config.model.tokenizer_chars is not None
    tokenizer = char_tokenizer(config.model.tokenizer_chars)
    path = tmp_path_factory.mktemp("models") / "m"
    save_model_directory(build_model(config.model.build, 0, tokenizer), tokenizer, path)
    return path


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has ended, with versions 0 and 1 live and 2 burnt."""
    root = RunDirectory(tmp_path / "run")
    root.model.mkdir(parents=True)
    (root.model / "config.json").write_text("{}")
    root.config.write_text(small_config().to_toml())
    store = VersionStore.open(root.versions, run="r")
    term = store.acquire_term("trainer-0", "a", 0.0)
    for step in range(3):
        store.reserve(term, step, step - 1 if step else None, 0.0)
        if step < 2:
            store.commit(step, f"digest-{step}", 0.0)
        else:
            store.burn(step, "nobody", 0.0)
    store.close()
    return root


def evaluate(model: Path, **config: Any) -> offline.OfflineEvaluation:
    found = ModelToEvaluate(model, None, small_config(**config))
    return asyncio.run(evaluate_offline(found))


def test_a_model_is_scored_on_what_is_held_out(model: Path) -> None:
    found = evaluate(model, eval={"num_prompts": 5, "samples": 2, "temperature": 1.0})
    assert (found.num_prompts, found.num_failed, found.first_failure) == (5, 0, None)
    assert 0.0 <= found.accuracy <= 1.0
    assert (found.version, found.digest, found.task, found.samples) == (None, None, "copy", 2)
    again = evaluate(model, eval={"num_prompts": 5, "samples": 2, "temperature": 1.0})
    assert again.accuracy == found.accuracy  # the seeds are the run's
    everything = evaluate(model, task={"args": {"digits": 3, "num_prompts": 20, "holdout": 7}})
    assert everything.num_prompts == 7


def test_what_fails_is_counted_and_nothing_but_failures_is_no_result(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = offline.open_scorer

    def broken(config: Config, task: Any, *, in_process: bool, log: Any) -> Any:
        scorer: Any = real(config, task, in_process=in_process, log=log)
        score, calls = scorer.score, []

        async def sometimes(prompt: Any, completions: Any) -> list[float]:
            calls.append(prompt)
            if len(calls) in fails:
                raise RewardFailed("no")
            result: list[float] = await score(prompt, completions)
            return result

        scorer.score = sometimes
        return scorer

    monkeypatch.setattr(offline, "open_scorer", broken)
    fails = range(2)
    found = evaluate(model, eval={"num_prompts": 3})
    assert (found.num_prompts, found.num_failed) == (2, 1)
    assert found.first_failure is not None
    assert found.first_failure.endswith(": no")
    fails = range(9)
    with pytest.raises(
        RunFailed, match=r"no prompt could be scored; the first failure: prompt .*no"
    ):
        evaluate(model, eval={"num_prompts": 3})


def test_a_run_knows_its_version_and_its_configuration(run: RunDirectory) -> None:
    newest = VersionRecord(1, 1, 1, 0, "live", "digest-1")
    for path in (run.root, run.model):
        found = find_model(path, None, ["eval.num_prompts=9"])
        assert (found.directory, found.record) == (run.model, newest)
        assert found.config.eval.num_prompts == 9


def test_a_directory_without_a_run_needs_a_configuration(run: RunDirectory, tmp_path: Path) -> None:
    alone = run.model.rename(tmp_path / "alone")
    with pytest.raises(UserError, match="has no model yet: a run writes it at its end"):
        find_model(run.root, None, ())
    with pytest.raises(UserError, match="is not of a run: give --config FILE"):
        find_model(alone, None, ())
    found = find_model(alone, run.config, ())
    assert (found.directory, found.record) == (alone, None)
    (alone / "config.json").unlink()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        find_model(alone, run.config, ())
    with pytest.raises(UserError, match="is not a directory"):
        find_model(tmp_path / "none", run.config, ())


def test_a_task_that_holds_nothing_out_is_a_mistake(model: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1>", "answer": "1"}\n')
    args = {"path": str(tmp_path / "train.jsonl")}
    with pytest.raises(UserError, match=r"holds no prompts out; hold some out in task\.args"):
        evaluate(model, task={"name": "jsonl", "args": args})
