"""What a run goes on from is found, or refused with nothing changed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.helpers.config import small_config

from ratchet.errors import UserError
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.resume import find_config, resume_run
from ratchet.runtime.rundir import create_run_directory
from ratchet.storage.checkpoint import CheckpointFacts
from ratchet.storage.checkpoints import Checkpoints
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.starts import Start, Starts
from ratchet.storage.versions import VersionStore

CONFIG = small_config(trainer={"num_steps": 9, "lr": 1e-3})


def make_run(root: Path, *steps: int) -> RunDirectory:
    """A run that was killed, with checkpoints of these steps and nine lines of metrics."""
    run = create_run_directory(root, CONFIG)
    VersionStore.open(run.versions, run="r1").close()
    GroupLedger.open(run.ledger, run="r1").close()
    checkpoints = Checkpoints(run.checkpoints, keep=9)
    for step in steps:
        (checkpoints.begin(step) / "state").write_text("x")
        checkpoints.finish(CheckpointFacts("r1", step, step, 1, "", None, 0.0))
    run.metrics.write_text("".join(f'{{"step":{step}}}\n' for step in range(1, 10)))
    return run


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and not path.name.endswith((".lock", "-shm", "-wal"))  # of who reads
    }


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_it_goes_on_from_the_newest_checkpoint_and_keeps_what_is_past_it(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3, 6)
    run.model.mkdir()
    run.summary.write_text("{}")
    found = resume_run(run.root, CONFIG, None)
    assert found == (run, "r1", 6, ())
    assert steps_of(run.metrics) == [1, 2, 3, 4, 5, 6]
    assert steps_of(run.root / "metrics.lost.jsonl") == [7, 8, 9]
    assert (run.root / "model-before-6").is_dir()
    assert not run.model.exists()
    assert not run.summary.exists()

    assert resume_run(run.root, CONFIG, 3).step == 3
    assert steps_of(run.root / "metrics.lost.jsonl") == [7, 8, 9, 4, 5, 6]
    with pytest.raises(UserError, match="no checkpoint of step 4; there are those of steps 3, 6"):
        resume_run(run.root, CONFIG, 4)


def test_a_run_that_died_before_a_checkpoint_begins_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert resume_run(run.root, CONFIG, None).step is None
    assert steps_of(run.metrics) == []


def test_a_changed_configuration_is_written_and_the_old_one_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    changed = CONFIG.model_copy(update={"trainer": CONFIG.trainer.model_copy(update={"lr": 0.5})})
    assert resume_run(run.root, changed, None).changes == (("trainer.lr", "0.5", "0.001"),)
    assert run.load_config() == changed
    assert "lr = 0.001" in (run.root / "config-before-3.toml").read_text()
    assert resume_run(run.root, CONFIG, None).changes == (("trainer.lr", "0.001", "0.5"),)
    assert "lr = 0.5" in (run.root / "config-before-3-2.toml").read_text()


@pytest.mark.parametrize(
    ("section", "change", "says"),
    [
        ("rollout", {"group_size": 2}, "rollout.group_size is 2 now and was 4"),
        ("task", {"name": "guess"}, "task.name is 'guess' now and was 'copy'"),
        ("task", {"fingerprint": "00"}, "task.fingerprint is '00' now and was '11'"),
        ("model", {"dtype": "bfloat16"}, "model.dtype is 'bfloat16' now and was 'float32'"),
        ("", {"seed": 5}, "seed is 5 now and was 0"),
    ],
)
def test_another_model_data_set_group_size_or_seed_is_refused(
    tmp_path: Path, section: str, change: dict[str, object], says: str
) -> None:
    run = make_run(tmp_path / "run", 3)
    fingerprinted = CONFIG.task.model_copy(update={"fingerprint": "11"})
    config = CONFIG.model_copy(update={"task": fingerprinted})
    run.config.write_text(config.to_toml())
    before = files(run.root)
    if section:
        change = {section: getattr(config, section).model_copy(update=change)}
    with pytest.raises(UserError, match=re.escape(says)):
        resume_run(run.root, config.model_copy(update=change), None)
    assert files(run.root) == before


def test_a_run_with_all_its_steps_says_how_to_train_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 9)
    before = files(run.root)
    with pytest.raises(UserError, match=r"--set trainer\.num_steps=N with N above 9"):
        resume_run(run.root, CONFIG, None)
    assert files(run.root) == before


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3)
    writer = GroupLedger.open(run.ledger, run="r1")
    before = files(run.root)
    with pytest.raises(UserError, match=r"has not ended: another process writes ledger\.sqlite"):
        resume_run(run.root, CONFIG, None)
    assert files(run.root) == before
    writer.close()
    resume_run(run.root, CONFIG, None)


def test_a_damaged_checkpoint_is_named_and_another_can_be_chosen(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 3, 6)
    (run.checkpoints / "version-00000006" / "state").write_text("y")
    with pytest.raises(UserError, match="version-00000006 is damaged: state"):
        resume_run(run.root, CONFIG, None)
    assert resume_run(run.root, CONFIG, 3).step == 3


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run to go on with"):
        find_config(tmp_path)
    run = create_run_directory(tmp_path / "run", CONFIG)
    with pytest.raises(UserError, match="died before it began"):
        resume_run(run.root, CONFIG, None)


def test_a_run_without_its_tables_or_checkpoints_names_them_and_stays_as_it_is(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run", 3)
    run.ledger.rename(tmp_path / "ledger")
    with pytest.raises(UserError, match=r"has no ledger\.sqlite, .* bring it back from a copy"):
        resume_run(run.root, CONFIG, None)
    run.ledger.write_bytes(b"no table at all" * 999)
    before = files(run.root)
    with pytest.raises(UserError, match=r"ledger\.sqlite"):
        resume_run(run.root, CONFIG, None)
    assert files(run.root) == before


def test_a_trained_run_whose_checkpoints_are_gone_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    store = VersionStore.open(run.versions, run="r1")
    store.reserve(store.acquire_term("trainer-0", "i", 0.0), 0, None, 0.0)
    store.close()
    before = files(run.root)
    with pytest.raises(UserError, match=r"has been trained, and .*checkpoints has nothing of that"):
        resume_run(run.root, CONFIG, None)
    assert files(run.root) == before
    Starts(run.checkpoints).record(Start(1, None, 0))  # it had not come to its first checkpoint
    assert resume_run(run.root, CONFIG, None).step is None
