"""The agent of a trainer's ranks: whatever ends it, the ranks end too, and it says why."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.helpers.command import gone, json_lines
from tests.helpers.trainer_agent import KEY, Agent

from ratchet.runtime.placement import RankSpec

pytestmark = [pytest.mark.soak, pytest.mark.timeout(180)]


def until(happened: Callable[[], object], *agents: Agent) -> None:
    deadline = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < deadline
        for agent in agents:
            assert agent.process.poll() is None, agent.outcome(5)
        time.sleep(0.05)  # nothing tells another process's files: there is no event to await


def private_folder(rank: psutil.Process) -> Path:
    return Path(rank.environ()["RATCHET_RANKS"])


def check_kept_to_themselves(processes: list[psutil.Process], folder: Path) -> None:
    """They listen on the loopback interface only, and the key is where only memory is."""
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.name for file in folder.iterdir()} == {"0.in", "1.in", "store"}
    assert KEY.encode() not in (folder / "store").read_bytes()
    for process in processes:
        listening = [
            connection.laddr.ip
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert set(listening) <= {"127.0.0.1"}
        assert KEY not in " ".join([*process.cmdline(), *process.environ().values()])


@pytest.mark.parametrize("how", ["the agent is killed", "the launcher is gone"])
def test_no_rank_outlives_its_agent_or_the_launcher(tmp_path: Path, how: str) -> None:
    with Agent(tmp_path, RankSpec(2)) as agent:
        until(agent.started, agent)
        ranks = agent.children()
        folder = private_folder(ranks[0])
        check_kept_to_themselves([psutil.Process(agent.process.pid), *ranks], folder)
        if how == "the agent is killed":
            ranks[1].suspend()  # one that stands still cannot see it
            agent.process.kill()
        else:
            assert agent.process.stdin is not None
            agent.process.stdin.close()
        agent.process.wait(5)
        assert gone(ranks, 3.0) == []
    assert folder.exists() == (how == "the agent is killed")


def test_sigterm_ends_the_ranks_in_order(tmp_path: Path) -> None:
    with Agent(tmp_path, RankSpec(2)) as agent:
        until(agent.started, agent)
        ranks = agent.children()
        agent.process.send_signal(signal.SIGTERM)
        outcome = agent.outcome(8.0)
        assert gone(ranks, 1.0) == []
    assert outcome.status == "stopped"
    assert agent.process.returncode == 0
    ends = [
        e for e in json_lines(agent.logs / "trainer-0.rank1.jsonl") if e["event"] == "rank_ended"
    ]
    assert [end["status"] for end in ends] == ["finished"]


def test_a_killed_rank_of_one_node_ends_the_other_node(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    specs = [RankSpec(1, 2, node, f"127.0.0.1:{port}") for node in (0, 1)]
    with Agent(tmp_path, specs[0]) as first, Agent(tmp_path, specs[1]) as second:
        until(lambda: first.started() and second.started(), first, second)
        (rank_0,), (rank_1,) = first.children(), second.children()
        assert port in {
            connection.laddr.port
            for connection in psutil.Process(first.process.pid).net_connections(kind="inet")
            if (connection.status, connection.laddr.ip) == (psutil.CONN_LISTEN, "127.0.0.1")
        }
        rank_1.kill()
        mine, theirs = second.outcome(10), first.outcome(10)
        assert gone([rank_0, rank_1], 1.0) == []
    assert (mine.status, theirs.status) == ("failed", "failed")
    assert mine.detail.startswith("rank 1 of the trainer died of signal 9")
    assert theirs.detail.startswith("node 1 of the trainer failed: rank 1 of the trainer died of")
