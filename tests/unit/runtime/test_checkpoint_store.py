"""Where a trainer begins, and what it leaves to know it by."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.helpers.config import small_config

from ratchet.errors import ConfigError
from ratchet.observability.logs import SilentLog
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.checkpoint_store import ChosenStart, RunCheckpoints
from ratchet.storage.starts import Start, Starts


def make(root: Path) -> RunCheckpoints:
    return RunCheckpoints(RunDirectory(root), "r1", small_config(), SilentLog())


async def save(store: RunCheckpoints, version: int, term: int) -> None:
    (await store.begin(version) / "state").write_text("x")
    await store.finish(version, version, term, None)


def test_each_term_leaves_where_it_began(tmp_path: Path) -> None:
    async def main() -> None:
        store = make(tmp_path)
        assert store.start() is None
        await store.begin_term(1, None, is_first=True)
        await save(store, 3, 1)
        start = store.start()
        assert start is not None
        await store.begin_term(2, start, is_first=False)

    asyncio.run(main())
    starts = Starts(tmp_path / "checkpoints")
    assert starts.all() == (Start(1, None, 0), Start(2, 3, 3))


def test_a_directory_without_the_runs_checkpoints_is_not_begun_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trained already, and .* has nothing of that.*--dir"):
        asyncio.run(make(tmp_path).begin_term(2, None, is_first=False))
    assert Starts(tmp_path / "checkpoints").newest() == 0


def test_a_start_that_another_trainer_has_just_removed_is_taken_back(tmp_path: Path) -> None:
    async def main() -> None:
        store = make(tmp_path)
        await store.begin_term(1, None, is_first=True)
        await save(store, 3, 1)
        start = store.start()
        assert start is not None
        await save(store, 6, 1)  # by the leader, which lives on
        shutil.rmtree(start.directory)
        with pytest.raises(FileNotFoundError, match="removed by another trainer"):
            await store.begin_term(2, start, is_first=False)
        newest = store.start()
        assert newest is not None
        assert newest.step == 6  # which counts still

    asyncio.run(main())


def test_a_chosen_start_is_that_of_the_first_trainer_that_begins(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    starts = Starts(run.checkpoints)
    starts.record(Start(1, None, 0))
    chosen, newest = ChosenStart(run, 3), ChosenStart(run, None)
    assert (chosen.step(), chosen.step(), newest.step()) == (3, 3, None)  # one died at once
    starts.record(Start(2, 3, 3))
    assert (chosen.step(), newest.step()) == (None, None)
