"""Temporary folders that only this process uses, of which none stays behind for good.

Consumes a kind, produces a folder of mode 0700 whose name says whose it is. A process that is
killed cannot remove its own: the next of its kind does, of the same user, machine and container,
unless another process has got its number meanwhile. Waits for the disk only. Only the standard
library is imported: keepers use it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
from pathlib import Path


def private_folder(kind: str, parent: Path | None = None) -> Path:
    """Make a folder, once those of the kind are gone that killed processes have left.

    Args:
        kind: what it is for, as a word of its name.
        parent: where; by default the system's directory for temporary files.

    Raises:
        OSError: if it cannot be made.
    """
    parent = parent or Path(tempfile.gettempdir())
    space = _pid_space()
    if space:
        with contextlib.suppress(OSError):  # a directory may be no one's to list
            _remove_abandoned(parent, f"ratchet-{kind}-{space}-")
    return Path(tempfile.mkdtemp(prefix=f"ratchet-{kind}-{space}-{os.getpid()}-", dir=parent))


def _pid_space() -> str:
    """Return what tells apart the processes that a number here does not mean: other hosts share the
    directory, and containers. "" where nothing does. Short, as paths of sockets have to be.
    """
    proc = Path("/proc")
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = (proc / "self/ns/pid").stat().st_ino
    except OSError:
        return ""
    return hashlib.blake2b(f"{boot} {namespace}".encode(), digest_size=6).hexdigest()


def _remove_abandoned(parent: Path, prefix: str) -> None:
    ours = re.compile(rf"{re.escape(prefix)}(\d{{1,9}})-\w+")
    for folder in parent.iterdir():
        found = ours.fullmatch(folder.name)
        if found is None or _exists(int(found[1])):
            continue
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if folder.stat(follow_symlinks=False).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
