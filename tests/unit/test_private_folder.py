from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet import private_folder as module
from ratchet.private_folder import private_folder

if TYPE_CHECKING:
    import pytest


def test_a_folder_is_its_users_own(tmp_path: Path) -> None:
    folder = private_folder("adapters", tmp_path)
    assert folder.parent == tmp_path
    assert folder.name.startswith("ratchet-adapters-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert private_folder("adapters", tmp_path) != folder
    assert folder.exists()


def test_what_a_killed_process_has_left_goes_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from ratchet.private_folder import private_folder;"
        "folder = private_folder('run', pathlib.Path(sys.argv[1])); (folder / 'token').touch();"
        "print(folder, flush=True); os.kill(os.getpid(), 9)"
    )
    dead = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert dead.returncode == -9, dead.stderr
    left = Path(dead.stdout.strip())
    assert left.is_dir()
    start, _, rest = left.name.partition("-run-")
    space, pid, _ = rest.split("-")
    others = [
        tmp_path / f"{start}-keeper-{space}-{pid}-abc",
        tmp_path / f"{start}-run-elsewhere-{pid}-abc",
        tmp_path / f"{start}-run-{space}-{os.getpid()}-abc",
        tmp_path / "target",
    ]
    for other in others:
        other.mkdir()
    link = tmp_path / f"{start}-run-{space}-{pid}-link"  # rmtree follows none
    link.symlink_to(others[-1])
    private_folder("run", tmp_path)
    assert not left.exists()
    assert all(other.exists() for other in (*others, link))


def test_where_numbers_mean_nothing_nothing_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_pid_space", lambda: "")
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass  # reaped
    other = tmp_path / f"ratchet-run--{dead.pid}-abc"
    other.mkdir()
    private_folder("run", tmp_path)
    assert other.exists()
