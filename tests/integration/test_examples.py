"""The examples do what they say, as a user would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(180)
def test_own_reward(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "own_reward.py", tmp_path / "run", "40"],
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rewards = [float(line.split()[3].rstrip(",")) for line in lines[:-1]]
    assert len(rewards) == 4
    assert rewards[-1] > 2 * rewards[0]
    assert lines[-1].startswith("finished after 40 steps")
