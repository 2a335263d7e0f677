"""Every door of a run is known, and none of them is open to every interface."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from tests.helpers.command import Command, json_lines
from tests.helpers.launched import Launched, Site
from tests.helpers.light_run import light_config

pytestmark = pytest.mark.timeout(180)

CONFIG = light_config(trainer={"num_steps": 100_000, "lr": 1e-3})


def doors(processes: Iterable[psutil.Process]) -> list[tuple[str, int]]:
    """Address and port of each internet socket that somebody else could reach."""
    return [
        (connection.laddr.ip, connection.laddr.port)
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN  # and what has no state: datagrams
        or (connection.status == psutil.CONN_NONE and connection.laddr)
    ]


def are_loopback(found: Iterable[tuple[str, int]]) -> bool:
    return all(ipaddress.ip_address(host).is_loopback for host, _ in found)


def test_a_run_of_one_machine_opens_nothing_but_the_trainers_way_for_weights(
    tmp_path: Path,
) -> None:
    with Command(CONFIG, tmp_path / "run") as command:
        command.until("a second step", lambda: len(command.steps()) >= 2)
        names = ("registry", "buffer", "trainer-0", "rollout-0")
        found = {name: doors([psutil.Process(command.child(name))]) for name in names}
        everything = doors(command.family())
    assert are_loopback(everything), found
    assert found["registry"] == found["buffer"] == []  # they have Unix sockets
    assert found["trainer-0"]
    assert len(everything) == len(found["trainer-0"]) + len(found["rollout-0"])


@pytest.mark.soak
def test_launched_roles_open_one_door_each_and_the_way_for_weights(tmp_path: Path) -> None:
    def found_at(launched: Launched) -> list[tuple[str, int]]:
        return doors(launched.family())

    with Site(tmp_path, CONFIG) as site:
        registry, buffer = site.launch("registry"), site.launch("buffer")
        trainer = site.launch("trainer")
        rollout = site.launch("rollout", "--node-rank", "0")
        metrics = trainer.directory / "metrics.jsonl"
        trainer.until("a second step", lambda: len(json_lines(metrics)) >= 2)
        found = {each.directory.name: found_at(each) for each in site.launched}
    assert all(are_loopback(each) for each in found.values()), found
    assert found["registry"] == [("127.0.0.1", int(site.registry.rpartition(":")[2]))]
    assert len(found["buffer"]) == 1
    assert len(found["trainer"]) >= 2
    assert len(found["rollout"]) >= 1
    assert rollout.directory != buffer.directory != registry.directory
