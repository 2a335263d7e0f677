"""A second rank for a training backend: a process that follows one gang after another.

    python -m tests.helpers.gang

Each line on its standard input is a JSON `Meeting`: the process joins as rank 1, follows the
leader, and answers with a line that says how it ended: "closed", or the error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ratchet.backends.training.fsdp import create_backend
from ratchet.backends.training.ranks import follow
from ratchet.config import parse_config
from ratchet.errors import RunFailed

TIMEOUT = timedelta(seconds=60)


def join(store: str, rank: int) -> None:
    """Enter a default group of two at a file."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=TIMEOUT
    )


class SecondRank:
    """The process, as the leader's side sees it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gang-")
        self._meetings = 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.helpers.gang"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @contextmanager
    def meet(self, config: dict[str, Any], model_dir: Path) -> Iterator[None]:
        """Make this process rank 0 of a gang of two, whose rank 1 follows."""
        self._meetings += 1
        store = f"{self._folder.name}/{self._meetings}"
        meeting = {"store": store, "config": config, "model": str(model_dir)}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(meeting) + "\n")
        self.process.stdin.flush()
        join(store, 0)
        try:
            yield
        finally:
            dist.destroy_process_group()

    def ended(self) -> str:
        """Wait until rank 1 has left the last gang; return how."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self._folder.cleanup()


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        meeting = json.loads(line)
        config = parse_config(meeting["config"])
        join(meeting["store"], 1)
        ended = "closed"
        try:
            follow(create_backend(config, Path(meeting["model"])))
        except RunFailed as error:
            ended = f"{type(error).__name__}: {error}"
        dist.destroy_process_group()
        sys.stdout.write(ended.replace("\n", " ") + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
