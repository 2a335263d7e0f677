"""A disk that is full, or read-only: an error that says so, and what was whole stays so."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from tests.helpers.config import small_config
from tests.helpers.training import make_groups

from ratchet.errors import UserError
from ratchet.observability.logs import configure_logging
from ratchet.observability.metrics import MetricsWriter, read_metrics
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.resume import resume_run
from ratchet.runtime.rundir import create_run_directory
from ratchet.storage.checkpoint import CheckpointFacts
from ratchet.storage.checkpoints import Checkpoints
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.payloads import Payloads
from ratchet.storage.versions import VersionStore

CONFIG = small_config(trainer={"num_steps": 9, "lr": 1e-3})


class SmallDisk:
    """A file system of 256 KiB."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._filler = root / "filler"

    def fill(self) -> None:
        with self._filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def leave(self, num_bytes: int) -> None:
        """Fill it but for so many bytes of a last page, which the next file to grow has."""
        self.fill()
        os.truncate(self._filler, self._filler.stat().st_size - num_bytes)

    def free(self) -> None:
        self._filler.unlink()

    def read_only(self) -> None:
        _mount("-o", "remount,ro", str(self.root))


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], check=False, capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    root = tmp_path / "disk"
    root.mkdir()
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("only root mounts a small disk")
    if not _mount("-t", "tmpfs", "-o", "size=256k", "none", str(root)):
        pytest.skip("this system does not let root mount a small disk")
    yield SmallDisk(root)
    subprocess.run(["umount", "-l", str(root)], check=True)


FAULTS: list[tuple[Callable[[SmallDisk], None], str]] = [
    (SmallDisk.fill, "No space left|disk is full|disk I/O error.* free space"),
    (SmallDisk.read_only, "[Rr]ead-only"),
]


@pytest.mark.parametrize(("break_it", "says"), FAULTS)
def test_a_new_run_is_refused(
    disk: SmallDisk, break_it: Callable[[SmallDisk], None], says: str
) -> None:
    break_it(disk)
    with pytest.raises(UserError, match=says):
        create_run_directory(disk.root / "run", CONFIG)


@pytest.mark.parametrize(("break_it", "says"), FAULTS)
def test_the_files_of_a_run_are_refused(
    disk: SmallDisk, break_it: Callable[[SmallDisk], None], says: str
) -> None:
    break_it(disk)
    for store in (GroupLedger, VersionStore):
        with pytest.raises(UserError, match=says):
            store.open(disk.root / f"{store.__name__}.sqlite")


@pytest.mark.parametrize(("break_it", "says"), FAULTS)
def test_a_resume_is_refused(
    disk: SmallDisk, break_it: Callable[[SmallDisk], None], says: str
) -> None:
    run = create_run_directory(disk.root / "run", CONFIG)
    VersionStore.open(run.versions, run="r").close()
    GroupLedger.open(run.ledger, run="r").close()
    _checkpoint(run, 1)
    run.metrics.write_text("".join(f'{{"step":{step}}}\n' for step in range(1, 400)))
    before = run.metrics.read_bytes()
    break_it(disk)
    with pytest.raises(UserError, match=says):
        resume_run(run.root, CONFIG, None)
    assert run.metrics.read_bytes() == before


def _checkpoint(run: RunDirectory, step: int, num_bytes: int = 10) -> None:
    checkpoints = Checkpoints(run.checkpoints, keep=1)
    (checkpoints.begin(step) / "state").write_bytes(bytes(num_bytes))
    checkpoints.finish(CheckpointFacts("r", step, step, 1, "", None, 0.0))


def test_a_checkpoint_that_does_not_fit_leaves_the_old_one(disk: SmallDisk) -> None:
    run = RunDirectory(disk.root)
    _checkpoint(run, 1)
    with pytest.raises(OSError, match="No space left"):
        _checkpoint(run, 2, num_bytes=2**20)
    checkpoints = Checkpoints(run.checkpoints, keep=1)
    checkpoints.abandon(2)
    assert checkpoints.find().facts.step == 1
    _checkpoint(run, 3)  # there is room again
    assert checkpoints.find().facts.step == 3


def test_payloads_that_do_not_fit_are_not_kept(disk: SmallDisk) -> None:
    payloads = Payloads(disk.root / "payloads")
    first = make_groups(1, 2)[0]
    payloads.put(first, 100)
    payloads.close()
    disk.fill()
    payloads = Payloads(disk.root / "payloads")
    second = msgspec.structs.replace(first, group_id=77)
    payloads.put(second, 100)
    payloads.close()
    assert "No space left" in payloads.error
    assert payloads.get(first.group_id, first.attempt) == first
    assert payloads.get(77, second.attempt) is None
    assert [path.suffix for path in (disk.root / "payloads").iterdir()] == [".payload"]


def test_a_line_of_metrics_that_does_not_fit_leaves_nothing(disk: SmallDisk) -> None:
    path = disk.root / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write({"step": 1})
    disk.leave(4096)
    with pytest.raises(OSError, match="No space left"):
        writer.write({"step": 2, "text": "x" * 9000})  # a part of it fits
    disk.free()
    writer.write({"step": 3})
    writer.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 3]


def test_a_log_line_that_does_not_fit_harms_nobody_and_is_counted(disk: SmallDisk) -> None:
    path = disk.root / "trainer-0.jsonl"
    log = configure_logging(path, role="trainer-0", run="r")
    disk.leave(4096)
    for step in range(3):
        log.info("step_trained", step=step, text="x" * 9000)
    disk.free()
    log.info("step_trained", step=3)
    found = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError):  # the one that was cut off
            found.append(msgspec.json.decode(line))
    assert [line["event"] for line in found] == ["log_opened", "log_lines_lost", "step_trained"]
    assert (found[1]["num_lines"], found[1]["level"], found[2]["step"]) == (3, "error", 3)
