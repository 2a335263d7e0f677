"""A checkpoint is whole or not there, at whatever point the process or the machine ends."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import pytest

from ratchet.errors import UserError
from ratchet.messages import StepTrained
from ratchet.storage.checkpoint import MANIFEST, CheckpointFacts
from ratchet.storage.checkpoints import Checkpoints, Disk

DONE = StepTrained(1, 5, (3, 4), {7: "stale"})


def facts(version: int, step: int | None = None) -> CheckpointFacts:
    step = version if step is None else step
    return CheckpointFacts("run", version, step, term=1, data="d", done=DONE, created_at=0.0)


def save(checkpoints: Checkpoints, version: int, step: int | None = None) -> None:
    directory = checkpoints.begin(version)
    (directory / "model").mkdir()
    (directory / "model" / "weights").write_bytes(f"v{version}".encode() * 1000)
    (directory / "state.json").write_text("{}")
    checkpoints.finish(facts(version, step))


def versions(checkpoints: Checkpoints) -> list[int]:
    return [each.facts.version for each in checkpoints.whole()]


def test_a_checkpoint_comes_back_as_it_was_written(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    save(checkpoints, 7, step=5)
    found = checkpoints.find()
    assert found.facts == facts(7, step=5)
    assert (found.path / "model" / "weights").read_bytes() == b"v7" * 1000
    assert sorted(found.files) == ["model/weights", "state.json"]
    assert found == checkpoints.find(step=5)


def test_the_newest_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for version in (3, 20, 100, 7_000_000_000):
        save(checkpoints, version)
    assert versions(checkpoints) == [100, 7_000_000_000]
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "version-00000100",
        "version-7000000000",
    }


def test_of_two_branches_with_one_step_the_newer_is_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=9)
    save(checkpoints, 3, step=2)
    save(checkpoints, 9, step=2)
    assert checkpoints.find(step=2).facts.version == 9


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "none", keep=1)
    with pytest.raises(UserError, match="no checkpoint; start the run anew"):
        checkpoints.find()
    save(checkpoints, 4)
    with pytest.raises(UserError, match="no checkpoint of step 3; there are those of steps 4"):
        checkpoints.find(step=3)
    with pytest.raises(FileExistsError):
        save(checkpoints, 4)


@pytest.mark.parametrize("name", ["model/weights", "state.json"])
@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 4)
    path = checkpoints.whole()[0].path / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "short" else b"x" + content[1:])
    with pytest.raises(UserError, match=f"version-00000004 is damaged: {name}: "):
        checkpoints.find()


def test_a_manifest_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 4)
    manifest = checkpoints.whole()[0].path / MANIFEST
    good = manifest.read_text()
    manifest.write_text(good.replace('"format": 1', '"format": 2'))
    with pytest.raises(UserError, match="format 2, and this Ratchet knows up to 1"):
        checkpoints.find()
    manifest.write_text("{")
    with pytest.raises(UserError, match=r"manifest\.json cannot be read"):
        checkpoints.find()


def test_a_save_that_is_given_up_leaves_the_others_and_no_rest(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    save(checkpoints, 1)
    (checkpoints.begin(2) / "weights").write_text("half")
    checkpoints.abandon(2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["version-00000001"]
    checkpoints.find()


def test_what_a_later_trainer_is_writing_is_left_alone(tmp_path: Path) -> None:
    later = Checkpoints(tmp_path, keep=1)
    (later.begin(5) / "weights").write_text("half")
    Checkpoints(tmp_path, keep=1).begin(4)  # of the trainer that it has replaced
    later.finish(facts(5))
    later.find()


class StuckDisk(Disk):
    """Removes nothing, as a file system does whose files somebody has open."""

    def remove(self, path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))


def test_what_cannot_be_removed_is_told_and_stops_nothing(tmp_path: Path) -> None:
    told: list[str] = []
    checkpoints = Checkpoints(
        tmp_path, keep=1, disk=StuckDisk(), not_removed=lambda path, _error: told.append(path.name)
    )
    for version in (1, 2, 3):
        save(checkpoints, version)
    assert versions(checkpoints) == [3]
    assert told == ["version-00000001", ".removed-version-00000001", "version-00000002"]


def test_a_damaged_old_checkpoint_does_not_undo_a_new_one(tmp_path: Path) -> None:
    told: list[str] = []
    checkpoints = Checkpoints(
        tmp_path, keep=1, not_removed=lambda _path, error: told.append(str(error))
    )
    save(checkpoints, 1)
    (tmp_path / "version-00000001" / MANIFEST).unlink()
    save(checkpoints, 2)
    assert (tmp_path / "version-00000002" / MANIFEST).exists()
    assert (tmp_path / "version-00000001").exists()
    (text,) = told
    assert "version-00000001/manifest.json cannot be read" in text


def test_what_is_removed_while_somebody_looks_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    save(checkpoints, 1)
    save(checkpoints, 2)
    listed = list(tmp_path.iterdir())
    shutil.rmtree(tmp_path / "version-00000001")
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(listed))
    assert versions(checkpoints) == [2]


class Crash(BaseException):
    """The process, or the machine, ends here."""


class CrashingDisk(Disk):
    """Ends before one of its operations, and knows what was not synced by then."""

    def __init__(self, before: int) -> None:
        self._left = before
        self.synced: set[Path] = set()
        self.renames: list[tuple[Path, Path]] = []
        """whose directory was not synced since"""

    def _count(self) -> None:
        if self._left == 0:
            raise Crash
        self._left -= 1

    def sync(self, path: Path) -> None:
        self._count()
        super().sync(path)
        self.synced.add(path)
        self.renames = [pair for pair in self.renames if pair[1].parent != path]

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)
        self.renames.append((old, new))

    def remove(self, path: Path) -> None:
        self._count()
        for file in sorted(path.rglob("*")):  # in the middle of it, too
            if file.is_file():
                self._count()
                file.unlink()
        super().remove(path)


def cut_power(disk: CrashingDisk, rng: random.Random) -> None:
    """Undo any of the renames that were not synced, the last ones first."""
    for old, new in reversed(disk.renames):
        if new.exists() and rng.random() < 0.5:
            new.rename(old)


def lose_unsynced(root: Path, disk: CrashingDisk, rng: random.Random) -> None:
    """Cut the files of the new checkpoint short that were not synced, by the name that they had
    then; of a directory whose entries were not, lose some.
    """
    unfinished, path = root / ".unfinished-version-00000003", root / "version-00000003"
    for at in (unfinished, path):
        for file in [each for each in at.rglob("*") if each.is_file()]:
            name = unfinished / file.relative_to(at)
            if name.parent not in disk.synced and rng.random() < 0.5:
                file.unlink()
            elif name not in disk.synced:
                content = file.read_bytes()
                file.write_bytes(content[: rng.randrange(len(content) + 1)])


@pytest.mark.parametrize("power", [False, True])
def test_a_whole_checkpoint_loads_after_a_crash_at_any_point(tmp_path: Path, power: bool) -> None:
    points = 0
    while not all(crash(tmp_path / f"{points}-{n}", points, n, power) for n in range(6)):
        points += 1
    assert points == NUM_OPERATIONS


NUM_OPERATIONS = 14
"""of a save: the rest of an earlier one, 5 syncs, a rename, a sync, and removing an old one"""


def crash(root: Path, point: int, attempt: int, power: bool) -> bool:
    """Save, crash before an operation, look, and save; whether all was done before the crash."""
    before = Checkpoints(root, keep=2)
    for version in (1, 2):
        save(before, version)
    (root / ".unfinished-version-00000000").mkdir()  # an earlier crash
    disk = CrashingDisk(point)
    try:
        save(Checkpoints(root, keep=2, disk=disk), 3)
    except Crash:
        rng = random.Random(f"{point}/{attempt}")
        if power:
            lose_unsynced(root, disk, rng)
            cut_power(disk, rng)
    else:
        return True
    after = Checkpoints(root, keep=2)
    assert len(after.whole()) >= 2
    for each in after.whole():
        each.verify()
    newest = after.find().facts.version
    assert newest in {2, 3}
    save(after, 4)  # the next one is written as if nothing had happened
    assert versions(after) == [newest, 4]
    assert not [entry for entry in root.iterdir() if entry.name.startswith(".")]
    return False
