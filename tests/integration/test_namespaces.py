"""A run over several hosts: one namespace each, joined by veth; cut off, slow, and lossy.

One run goes through all of it, because each start costs more than what is then looked at.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.command import json_lines
from tests.helpers.config import small_config
from tests.helpers.namespaces import Hosts, why_not

from ratchet.storage.versions import read_versions

REASON = why_not()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(300),
    pytest.mark.soak,
]

REGISTRY, BUFFER, TRAINER, ROLLOUT = 1, 1, 2, 3  # rollout-0 lives on host 3, rollout-1 on host 4
PORT = 7070
CUT_S = 30.0


class Cluster:
    """`ratchet launch` of every role, each on its host, with a directory of its own."""

    def __init__(self, hosts: Hosts, root: Path, config: str) -> None:
        self.hosts = hosts
        self.root = root
        self.config = root / "job.toml"
        self.config.write_text(config)
        self.token = root / "token"
        self.token.touch(mode=0o600)
        self.token.write_text(os.urandom(32).hex())
        self.launchers: dict[str, subprocess.Popen[str]] = {}

    def directory(self, name: str) -> Path:
        return self.root / name

    def launch(self, host: int, role: str, name: str, *args: str) -> None:
        command = [
            sys.executable, "-m", "ratchet.cli", "launch", role, str(self.config),
            "--registry", f"{self.hosts.ip(REGISTRY)}:{PORT}", "--host", self.hosts.ip(host),
            "--dir", str(self.directory(name)), "--token-file", str(self.token), *args,
        ]  # fmt: skip
        self.launchers[name] = subprocess.Popen(
            self.hosts.at(host, command),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def status(self, host: int) -> dict[str, Any]:
        command = [
            sys.executable, "-m", "ratchet.cli", "status", "--json", "--registry",
            f"{self.hosts.ip(REGISTRY)}:{PORT}", "--token-file", str(self.token),
        ]  # fmt: skip
        done = subprocess.run(
            self.hosts.at(host, command), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def steps(self) -> int:
        return len(json_lines(self.directory("trainer-0") / "metrics.jsonl"))

    def events(self, name: str, event: str, of: str | None = None) -> list[dict[str, Any]]:
        lines = json_lines(self.directory(name) / "logs" / f"{of or name}.jsonl")
        return [line for line in lines if line["event"] == event]

    def until(self, what: str, happened: Callable[[], Any], within_s: float = 90.0) -> Any:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if value := happened():
                return value
            for name, launcher in self.launchers.items():
                if launcher.poll() is not None:
                    output = launcher.stdout.read()
                    raise AssertionError(f"{name} ended before {what}:\n{output}")
            time.sleep(0.1)  # other processes' files: there is no event to await
        raise AssertionError(f"no {what} within {within_s} s")

    def finish(self, within_s: float) -> dict[str, tuple[int, str]]:
        deadline = time.monotonic() + within_s
        ends = {}
        for name, launcher in self.launchers.items():
            output, _ = launcher.communicate(timeout=max(0.1, deadline - time.monotonic()))
            ends[name] = (launcher.returncode, output)
        return ends


@contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    with ExitStack() as stack:
        for role, name, host in (
            ("registry", "registry", REGISTRY),
            ("buffer", "buffer", BUFFER),
            ("trainer", "trainer-0", TRAINER),
        ):
            cluster.launch(host, role, name)
        for rank in range(2):
            cluster.launch(ROLLOUT + rank, "rollout", f"rollout-{rank}", "--node-rank", str(rank))
        for launcher in cluster.launchers.values():
            stack.callback(_end, launcher)
        yield cluster


def _end(launcher: subprocess.Popen[str]) -> None:
    if launcher.poll() is None:
        launcher.kill()  # its role dies with it
    launcher.communicate()


def test_a_run_over_four_hosts_survives_a_cut_and_a_slow_lossy_link(tmp_path: Path) -> None:
    config = small_config(
        rollout={"max_tokens": 5, "group_size": 4, "num_workers": 2},
        trainer={"num_steps": 100_000, "lr": 1e-3},
        weights={"timeout_s": 10.0},
    )
    with Hosts(4) as hosts, running(Cluster(hosts, tmp_path, config.to_toml())) as cluster:
        cluster.until("ten steps", lambda: cluster.steps() >= 10)
        cluster.until("both workers", lambda: loaded_by_newest_life(cluster, "rollout-0"))

        # host 3 is cut off for 30 s: the others go on, and it comes back
        hosts.cut(ROLLOUT)
        cut_at = time.monotonic()
        cluster.until(
            "the registry to give rollout-0 up",
            lambda: [
                e for e in cluster.events("registry", "role_left", "registry-0")
                if e["name"] == "rollout-0"
            ],
        )  # fmt: skip
        assert 10 < time.monotonic() - cut_at < 25  # dead_s is 15
        alone = cluster.steps()
        cluster.until("steps without it", lambda: cluster.steps() >= alone + 10)
        time.sleep(max(0.0, CUT_S - (time.monotonic() - cut_at)))  # the cut itself lasts so long
        hosts.join(ROLLOUT)
        cluster.until("its launcher to start it again", lambda: started(cluster, "rollout-0") >= 2)
        cluster.until("weights in it", lambda: loaded_by_newest_life(cluster, "rollout-0"))

        # 50 ms and 1% loss on the trainer's link: slower, and right
        hosts.shape(TRAINER, delay_s=0.05, loss=0.01)
        before, lost = cluster.steps(), hosts.num_lost
        cluster.until("ten slow steps", lambda: cluster.steps() >= before + 10)
        assert hosts.num_lost > lost
        state = cluster.status(4)
        up = {row["role"]["name"] for row in state["status"]["roles"] if row["up"]}
        assert up == {"registry", "buffer", "trainer-0", "rollout-0", "rollout-1"}
        hosts.shape(TRAINER, delay_s=0.0, loss=0.0)

        # the trainer's end is everyone's
        cluster.launchers["trainer-0"].send_signal(signal.SIGTERM)
        ends = cluster.finish(30.0)
    codes = {name: code for name, (code, _) in ends.items()}
    assert codes.pop("trainer-0") == 128 + signal.SIGTERM, ends
    assert set(codes.values()) == {0}, ends
    versions = list(read_versions(cluster.directory("registry") / "versions.sqlite"))
    assert [v.version for v in versions] == list(range(len(versions)))


def started(cluster: Cluster, name: str) -> int:
    return len(cluster.events(name, "role_starting"))


def loaded_by_newest_life(cluster: Cluster, name: str) -> bool:
    pid = cluster.events(name, "role_starting")[-1]["pid"]
    return any(e["pid"] == pid for e in cluster.events(name, "weights_loaded"))
