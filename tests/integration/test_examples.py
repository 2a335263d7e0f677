"""The examples do what they say, as a user would run them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ratchet.storage.ledger import read_groups
from ratchet.storage.versions import VersionStore

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

pytestmark = pytest.mark.timeout(180)


def run_example(name: str, *arguments: object) -> list[str]:
    """Return the lines that an example prints."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name, *map(str, arguments)],
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_own_reward(tmp_path: Path) -> None:
    lines = run_example("own_reward.py", tmp_path / "run", 40)
    rewards = [float(line.split()[3].rstrip(",")) for line in lines[:-1]]
    assert len(rewards) == 4
    assert rewards[-1] > 2 * rewards[0]
    assert lines[-1].startswith("finished after 40 steps")


@pytest.mark.soak
def test_own_buffer(tmp_path: Path) -> None:
    lines = run_example("own_buffer.py", tmp_path / "run", 20)
    spreads = [float(line.split()[-1]) for line in lines[:-1]]
    assert len(spreads) == 2
    assert min(spreads) > 0.0
    assert lines[-1].startswith("finished after 20 steps")


def test_four_actors() -> None:
    lines = run_example("four_actors.py", 40)
    rewards = [float(line.rsplit(maxsplit=1)[1]) for line in lines[:-2]]
    assert len(rewards) == 4
    assert rewards[-1] > 1.5 * rewards[0]
    assert lines[-2:] == ["finished after 40 steps", "trainer: stopped"]


def test_own_trainer(tmp_path: Path) -> None:
    lines = run_example("own_trainer.py", tmp_path / "run", 50)
    pattern = re.compile(r"step (\d+): reward (.+), published version (\d+)")
    steps = [pattern.fullmatch(line) for line in lines[:-1]]
    assert [match and match[1] for match in steps] == ["10", "20", "30", "40", "50"]
    rewards = [float(match[2]) for match in steps if match]
    assert rewards[-1] > 1.5 * rewards[0]
    assert lines[-1].startswith("finished after 50 steps")

    # each step has a version of its own, the last one is live, and every group is accounted for
    with_versions = VersionStore.open(tmp_path / "run" / "versions.sqlite")
    records = with_versions.records()
    with_versions.close()
    assert [record.step for record in records] == list(range(51))
    assert records[-1].state == "live"
    groups = list(read_groups(tmp_path / "run" / "ledger.sqlite"))
    trained = [group for group in groups if group.state in {"trained", "committed"}]
    assert len(trained) == 50 * 8
    assert max(group.staleness for group in trained if group.staleness is not None) <= 4
    assert not [group for group in groups if group.state == "batched"]


def test_own_producer(tmp_path: Path) -> None:
    lines = run_example("own_producer.py", tmp_path / "run", 24)
    assert lines[0].startswith("finished after 24 steps")
    groups = list(read_groups(tmp_path / "run" / "ledger.sqlite"))
    own = [group for group in groups if group.worker == "producer-0"]
    handed_in = [group for group in own if group.finished_at is not None]
    assert handed_in
    for group in handed_in:
        assert (group.min_version, group.max_version) == (0, 0)
        assert group.num_rollouts == 8
        if group.state in {"trained", "committed"}:  # version 0: as stale as there are steps since
            assert group.staleness is not None
            assert group.trained_step is not None
            assert group.staleness == group.trained_step - 1 <= 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    """Less than 60 lines of code: without docstrings, imports, comments and blank lines."""
    text = path.read_text()
    code = {line for line, words in enumerate(text.splitlines(), 1) if words.split("#")[0].strip()}
    for node in ast.walk(ast.parse(text)):
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if docstring or isinstance(node, ast.Import | ast.ImportFrom):
            code -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    assert len(code) < 60
