from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.config import small_config

from ratchet.errors import ConfigError
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.rundir import create_run_directory


def test_the_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = small_config(trainer={"num_steps": 7})
    run = create_run_directory(tmp_path / "a" / "b" / "run", config)
    assert run.logs.is_dir()
    assert sorted(path.name for path in run.root.iterdir()) == ["config.toml", "logs"]
    assert RunDirectory(run.root).load_config() == config


def test_every_file_has_a_name_of_its_own(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    names = [name for name, value in vars(RunDirectory).items() if isinstance(value, property)]
    paths = {getattr(run, name) for name in names}
    assert len(paths) == len(names) == 8
    assert {path.parent for path in paths} == {tmp_path}


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    create_run_directory(tmp_path, small_config())
    assert (tmp_path / "config.toml").exists()


def test_a_run_or_a_file_is_never_written_over(tmp_path: Path) -> None:
    create_run_directory(tmp_path / "run", small_config())
    (tmp_path / "file").write_text("mine")
    for taken in ("run", "file"):
        with pytest.raises(ConfigError, match=f"{taken} exists already.*--dir"):
            create_run_directory(tmp_path / taken, small_config(trainer={"num_steps": 99}))
    assert (tmp_path / "file").read_text() == "mine"
    assert RunDirectory(tmp_path / "run").load_config().trainer.num_steps == 3


def test_a_place_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make .*Not a directory; give another --dir"):
        create_run_directory(tmp_path / "file" / "run", small_config())
