"""What is in deploy/slurm/ and the commands in docs/, as far as they can be checked here.

No Slurm here: the batch script runs against a stand-in `srun`, and every `ratchet` command line is
parsed by the real command.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.deployed import ROOT, parse

from ratchet.transport.mailbox.credentials import load_token

SBATCH = ROOT / "deploy" / "slurm" / "ratchet.sbatch"
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


# --- Slurm


def test_the_batch_script_is_sound() -> None:
    subprocess.run(["bash", "-n", SBATCH], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, SBATCH], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


RATCHET = """#!/bin/bash
printf '%s\\n' "$(printf '%q ' "$@")" >> "$FAKES/calls"
role=$2
trap 'echo "$role was told to stop"; echo "$role" >> "$FAKES/stopped"; exit 0' TERM
echo "$role is up"
echo "$role" >> "$FAKES/up"
[[ $role != "${FAILS:-}" ]] || { echo "the run failed: $role: the disk is full"; exit 1; }
while [[ ! -e $FAKES/over ]]; do sleep 0.02; done
echo "$role: the run has ended"
"""
FAKES = {
    "ratchet": RATCHET,
    "srun": '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n',
    "scontrol": "#!/bin/bash\nprintf 'n%s\\n' 1 2 3 4\n",
    "getent": '#!/bin/bash\necho "127.0.0.${2#n} STREAM $2"\n',
    "ip": "#!/bin/bash\necho '2: ib0    inet 10.1.2.3/24 brd 10.1.2.255 scope global ib0'\n",
}


class Job:
    """The batch script, running."""

    def __init__(self, root: Path, *arguments: str, **environment: str) -> None:
        self.fakes = root / "fakes"
        self.fakes.mkdir()
        for name, text in FAKES.items():
            (self.fakes / name).write_text(text)
            (self.fakes / name).chmod(0o755)
        self.state = root / "runs" / "job-7"
        slurm = {
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-4]",
            "RATCHET_DIR": str(root / "runs"),
        }
        path = {"PATH": f"{self.fakes}:{os.environ['PATH']}", "FAKES": str(self.fakes)}
        own = {"RATCHET_DIR": str(root / "runs"), "GRACE_S": "6", **environment}
        self.process = subprocess.Popen(
            ["bash", SBATCH, *arguments],
            env={**os.environ, **slurm, **path, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def lines(self, name: str) -> list[str]:
        path = self.fakes / name
        return path.read_text().splitlines() if path.exists() else []

    def calls(self) -> dict[str, dict[str, Any]]:
        """The parsed command line of each part, by kind and rank."""
        parsed = [parse(shlex.split(line)) for line in self.lines("calls")]
        return {f"{call['role'].value}-{call['node_rank'] or 0}": call for call in parsed}

    def until(self, condition: Callable[[], bool]) -> None:
        tick = threading.Event()
        while not condition():
            assert self.process.poll() is None, self.process.communicate()
            tick.wait(0.02)

    def end(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    started: list[Job] = []

    def start(*arguments: str, **environment: str) -> Job:
        started.append(Job(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for job in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGKILL)


def test_a_job_starts_every_role_where_it_belongs(jobs: Callable[..., Job]) -> None:
    job = jobs("copy.toml", "trainer.num_steps=9", TRAINER_NODES="2", ROLLOUTS_PER_NODE="2")
    job.until(lambda: len(job.lines("up")) == 8)
    assert job.state.joinpath("token").stat().st_mode & 0o777 == 0o600
    load_token(str(job.state / "token"))
    (job.fakes / "over").touch()
    code, out, _ = job.end()
    assert (code, out.splitlines()[-1]) == (0, "registry: the run has ended")

    calls = job.calls()
    assert sorted(calls) == [
        "buffer-0",
        "registry-0",
        *(f"rollout-{rank}" for rank in range(4)),
        "trainer-0",
        "trainer-1",
    ]
    for name, call in calls.items():
        assert call["registry"] == "127.0.0.1:7301"
        assert call["token_file"] == str(job.state / "token")
        assert call["overrides"] == ["trainer.num_steps=9"]
        assert call["config"] == Path("copy.toml")
        node = {"trainer-1": 2, "rollout-0": 3, "rollout-1": 3, "rollout-2": 4, "rollout-3": 4}
        assert call["host"] == f"127.0.0.{node.get(name, 1)}"
    for rank in (0, 1):
        assert calls[f"trainer-{rank}"]["num_nodes"] == 2
        assert calls[f"trainer-{rank}"]["rendezvous"] == "127.0.0.1:7302"
    shared = [calls[name]["directory"] for name in ("registry-0", "buffer-0", "trainer-0")]
    assert set(shared) == {job.state / "run"}
    assert len({call["directory"] for call in calls.values()}) == 6


def test_the_first_part_that_fails_ends_the_job_with_its_words(jobs: Callable[..., Job]) -> None:
    job = jobs("copy.toml", FAILS="trainer")
    code, _, err = job.end()
    assert code == 1
    assert err.splitlines()[-1] == (
        "trainer-0 failed with exit code 1: the run failed: trainer: the disk is full"
    )
    assert sorted(job.lines("stopped")) == ["buffer", "registry", "rollout", "rollout", "rollout"]


def test_a_signal_goes_to_every_part(jobs: Callable[..., Job]) -> None:
    job = jobs("copy.toml")
    job.until(lambda: len(job.lines("up")) == 6)
    job.process.send_signal(signal.SIGTERM)
    code, _, err = job.end()
    assert (code, err) == (143, "")
    assert len(job.lines("stopped")) == 6


def test_a_job_uses_the_interface_that_it_is_told(jobs: Callable[..., Job]) -> None:
    job = jobs("copy.toml", RATCHET_INTERFACE="ib0")
    job.until(lambda: len(job.lines("up")) == 6)
    (job.fakes / "over").touch()
    assert job.end()[0] == 0
    assert {call["host"] for call in job.calls().values()} == {"10.1.2.3"}


def test_a_job_without_nodes_for_rollouts_is_refused(jobs: Callable[..., Job]) -> None:
    code, _, err = jobs("copy.toml", TRAINER_NODES="4").end()
    assert code == 2
    assert "leave none for rollouts" in err


# --- command lines in documents


def command_lines() -> list[tuple[str, str]]:
    """Every `ratchet ...` line of a code block, with what continues it."""
    found = []
    for path in DOCS:
        for block in re.findall(r"^```(?:\w*)\n(.*?)^```", path.read_text(), re.M | re.S):
            for line in block.replace("\\\n", " ").splitlines():
                text = line.strip().removeprefix("$ ").split(" #")[0].rstrip(" &")
                if re.match(r"(\S+=\S+ )*ratchet ", text):
                    found.append((path.name, text[text.index("ratchet ") :]))
    return found


@pytest.mark.parametrize(("document", "line"), command_lines())
def test_a_command_in_a_document_is_one(document: str, line: str) -> None:
    del document
    words = [re.sub(r"\$\{?\w+\}?|\b[A-Z]{1,2}\b", "1", word) for word in shlex.split(line)[1:]]
    assert parse(words) is not None


def test_the_documents_have_commands() -> None:
    assert {"deploy.md", "README.md"} <= {document for document, _ in command_lines()}
