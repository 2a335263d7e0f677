"""A trainer on two nodes: whatever ends one of them, both meet again and go on together."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import psutil
import pytest
from tests.helpers.command import gone, json_lines, kill
from tests.helpers.config import small_config
from tests.helpers.launched import Launched, Site
from typer.testing import CliRunner

from ratchet import cli_audit
from ratchet.storage.versions import read_versions

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

CONFIG = small_config(
    rollout={"max_tokens": 5, "group_size": 4},
    trainer={"num_steps": 100_000, "lr": 1e-3},
    checkpoint={"every_steps": 2},
    runtime={"max_restarts": 10},
)


class Nodes:
    """A run whose roles share a directory, and whose trainer has two launchers."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self.root = site.root / "run"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
        for role in ("registry", "buffer", "rollout"):
            self.launch(role)
        self.nodes = [self.trainer(0), self.trainer(1)]

    def launch(self, role: str, *args: str, name: str | None = None) -> Launched:
        launched = self._site.launch(role, "--dir", str(self.root), *args, name=name)
        launched.directory = self.root
        return launched

    def trainer(self, node: int) -> Launched:
        where = ("--num-nodes", "2", "--node-rank", str(node), "--rendezvous", self._rendezvous)
        return self.launch("trainer", *where, name=f"trainer-{node}")

    def rank(self, node: int) -> psutil.Process:
        """The only rank of a node."""
        (rank,) = psutil.Process(self.nodes[node].child(f"trainer-{node}")).children()
        return rank

    def steps(self) -> list[int]:
        return [line["step"] for line in json_lines(self.root / "metrics.jsonl")]

    def terms(self) -> int:
        path = self.root / "versions.sqlite"
        return max((v.term for v in read_versions(path)), default=0) if path.exists() else 0

    def trains_in_term(self, term: int, num_steps: int = 3) -> None:
        """Wait for a life of the trainer, and steps that it takes."""
        self.nodes[0].until(f"term {term}", lambda: self.terms() >= term, within_s=300)
        due = len(self.steps()) + num_steps
        self.nodes[0].until(f"step {due}", lambda: len(self.steps()) >= due, within_s=300)
        assert self.terms() == term


def die(launched: Launched) -> None:
    """The machine of a launcher is gone."""
    family = launched.family()
    kill(family[0].pid)
    assert launched.finish() == -signal.SIGKILL
    assert gone(family[1:], 5.0) == []


def test_a_trainer_on_two_nodes_goes_on_whichever_of_them_dies(tmp_path: Path) -> None:
    with Site(tmp_path, CONFIG) as site:
        run = Nodes(site)
        run.trains_in_term(1)
        for term, node in ((2, 1), (3, 0)):
            both = [run.rank(0), run.rank(1)]
            both[node].kill()
            run.trains_in_term(term)
            assert gone(both, 1.0) == []

        die(run.nodes[1])
        run.nodes[1] = run.trainer(1)
        run.trains_in_term(4)
        for role in ("registry", "buffer"):
            (launched,) = (each for each in site.launched if each.role == role)
            die(launched)
            run.launch(role)
            run.trains_in_term(4)

        kill(run.nodes[0].process.pid, signal.SIGTERM)
        codes = [launched.finish() for launched in site.launched if launched.process.poll() is None]
    assert set(codes) <= {0, 128 + signal.SIGTERM}, [each.output for each in site.launched]
    result = CliRunner().invoke(cli_audit.app, ["audit", str(run.root)])
    assert result.exit_code == 0, result.output
