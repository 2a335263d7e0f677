"""The agent of a trainer's ranks without the rest of a run: nobody answers as the registry, so that
rank 0 leads a backend that needs no model, and waits.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
from tests.helpers.config import small_config

from ratchet.backends.training.base import TrainingBackend
from ratchet.backends.training.fake import FakeBackend
from ratchet.backends.training.ranks import lead
from ratchet.backends.training.sharding import current_ranks
from ratchet.config import Config
from ratchet.runtime.placement import RankSpec, RoleSpec
from ratchet.runtime.role import RoleOutcome
from ratchet.types import RoleInfo

KEY = "5e" * 32


class TellingBackend(FakeBackend):
    """Leaves a file in the directory of the model when it has started."""

    def __init__(self, model_dir: Path) -> None:
        super().__init__()
        self._model_dir = model_dir

    async def start(self) -> None:
        await super().start()
        (self._model_dir / f"started-{current_ranks().rank}").touch()


def create_backend(config: Config, model_dir: Path) -> TrainingBackend:
    """A factory as a user's: `trainer.backend = "tests.helpers.trainer_agent:create_backend"`."""
    return lead(TellingBackend(model_dir))


class Agent:
    """One node's agent, its ranks, and what they write."""

    def __init__(self, folder: Path, ranks: RankSpec) -> None:
        self.logs = folder / "run" / "logs"
        self.ranks = ranks
        self.logs.mkdir(parents=True, exist_ok=True)
        self._model = folder / "model"
        self._model.mkdir(exist_ok=True)
        backend = f"{create_backend.__module__}:{create_backend.__name__}"
        config = small_config(
            model={"build": None, "path": str(self._model)},
            trainer={"num_steps": 1, "backend": backend},
        )
        (folder / "run" / "config.toml").write_text(config.to_toml())
        spec = RoleSpec(
            role=RoleInfo("trainer", "trainer-0", "life"),
            run_dir=str(folder / "run"),
            run_id="r",
            listen=f"unix:{folder}/trainer-0.sock",
            registry=f"unix:{folder}/registry.sock",
            key=KEY,
            ranks=ranks,
        )
        with (folder / f"agent{ranks.node_rank}.err").open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ratchet.runtime.ranks"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(spec) + b"\n")
        self.process.stdin.flush()

    def started(self) -> bool:
        """Whether every rank of this node has done as rank 0 said."""
        first = self.ranks.node_rank * self.ranks.ranks_per_node
        return all(
            (self._model / f"started-{rank}").exists()
            for rank in range(first, first + self.ranks.ranks_per_node)
        )

    def children(self) -> list[psutil.Process]:
        """The ranks of this node, in order."""
        children = psutil.Process(self.process.pid).children()
        return sorted(children, key=lambda process: int(process.environ()["RANK"]))

    def outcome(self, within_s: float) -> RoleOutcome:
        """Wait for the end; return what it says."""
        self.process.wait(within_s)  # with its standard input open: the launcher is there
        assert self.process.stdout is not None
        return msgspec.json.decode(self.process.stdout.read(), type=RoleOutcome)

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
