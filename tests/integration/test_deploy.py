"""The batch script, with real roles on loopback: only Slurm is stood in for."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.soak, pytest.mark.timeout(240)]

STAND_INS = {
    "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
    "scontrol": "echo n1; echo n2",
    "getent": 'echo "127.0.0.1 STREAM $2"',
}


def test_a_job_trains_on_two_nodes(tmp_path: Path) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "RATCHET_DIR": str(tmp_path / "runs"),
        "REGISTRY_PORT": str(port),
    }
    script = ROOT / "deploy" / "slurm" / "ratchet.sbatch"
    config = ROOT / "examples" / "tiny_copy.toml"
    done = subprocess.run(
        ["bash", script, config, "trainer.num_steps=6"],
        env=environment,
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "registry: the run has ended: 6 steps are trained"
    run = tmp_path / "runs" / "job-7" / "run"
    assert json.loads((run / "summary.json").read_text())["steps"] == 6
    assert (run / "model" / "model.safetensors").exists()
    left = subprocess.run(["pgrep", "-f", str(run)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
