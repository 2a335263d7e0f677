import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from ratchet.errors import ConfigError
from ratchet.runtime import rendezvous
from ratchet.runtime.placement import RankSpec
from ratchet.runtime.rendezvous import (
    FOR_GOOD,
    LIFE,
    FixedRendezvous,
    NodeLost,
    rank_store,
)

WITHIN_S = 20.0


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_BEAT_S", 0.02)
    monkeypatch.setenv(LIFE, "")  # and away with it after the test


@pytest.fixture(autouse=True)
def closing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close every node of a test: a thread in torch's code must not see the process end."""
    every: list[FixedRendezvous] = []
    begin = FixedRendezvous.__init__

    def noted(self: FixedRendezvous, *args: Any) -> None:
        begin(self, *args)
        every.append(self)

    monkeypatch.setattr(FixedRendezvous, "__init__", noted)
    yield
    for each in every:
        each.close()


def nodes(endpoint: str, number: int = 2) -> list[FixedRendezvous]:
    return [FixedRendezvous(RankSpec(4, number, node, endpoint), "run") for node in range(number)]


def meet(*every: FixedRendezvous) -> list[Any]:
    with ThreadPoolExecutor(len(every)) as threads:
        return [
            each.result(WITHIN_S) for each in [threads.submit(n.next_rendezvous) for n in every]
        ]


def until(happened: Callable[[], Any]) -> None:
    pause = threading.Event()
    for _ in range(int(WITHIN_S / 0.01)):
        if happened():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen")


def listening() -> set[tuple[str, int]]:
    return {
        (connection.laddr.ip, connection.laddr.port)
        for connection in psutil.Process().net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def test_alone_nothing_listens(tmp_path: Path) -> None:
    before = listening()
    alone = FixedRendezvous(RankSpec(2), "run")
    info = alone.next_rendezvous()
    store = rank_store(RankSpec(2), "run", tmp_path)
    store.set("key", "value")
    assert (info.rank, info.world_size) == (0, 1)
    assert alone.num_nodes_waiting() == 0
    assert listening() == before
    assert (tmp_path / "store").exists()


def test_nodes_meet_at_one_address_and_their_ranks_too(endpoint: str, tmp_path: Path) -> None:
    before = listening()
    every = nodes(endpoint, 3)
    infos = meet(*every)
    assert [(info.rank, info.world_size) for info in infos] == [(0, 3), (1, 3), (2, 3)]
    host, _, port = endpoint.partition(":")
    assert listening() - before == {(host, int(port))}
    infos[2].store.set("key", "value")
    assert infos[0].store.get("key") == b"value"
    rank_store(RankSpec(4, 3, 1, endpoint), "run", tmp_path).set("key", "of a rank")
    assert infos[0].store.get("key") == b"value"
    assert [node.num_nodes_waiting() for node in every] == [0, 0, 0]


def test_a_failed_node_is_named_on_the_others(endpoint: str) -> None:
    first, second = nodes(endpoint)
    meet(first, second)
    second.fail("rank 5 of the trainer died of signal 9")
    words = "node 1 of the trainer failed: rank 5 of the trainer died of signal 9"
    assert first.hear(WITHIN_S) == words
    with pytest.raises(NodeLost, match=words):
        first.num_nodes_waiting()
    assert second.hear(0.0) is None


def test_a_silent_node_is_given_up(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = nodes(endpoint)
    meet(first, second)
    until(lambda: first._heard[1][0])
    assert first.num_nodes_waiting() == 0
    monkeypatch.setattr(second, "_failed", True)  # it says nothing any more
    monkeypatch.setattr(rendezvous, "SILENT_S", 0.3)
    with pytest.raises(NodeLost, match=r"node 1 of the trainer has been silent for 0\.3 s"):
        until(first.num_nodes_waiting)


def test_a_node_that_comes_again_waits_for_the_next_gang(endpoint: str) -> None:
    first, second = nodes(endpoint)
    meet(first, second)
    old = os.environ[LIFE]
    second.close()  # dead
    later = nodes(endpoint)
    with ThreadPoolExecutor(2) as threads:
        again = threads.submit(later[1].next_rendezvous)
        until(lambda: first._store.add("entered/1", 0) > 1)
        assert not again.done()
        first.close()
        first._store = None  # and with it the server
        first_again = threads.submit(later[0].next_rendezvous)
        assert again.result(WITHIN_S).world_size == first_again.result(WITHIN_S).world_size == 2
    assert os.environ[LIFE] not in {"", old}
    assert [node.num_nodes_waiting() for node in later] == [0, 0]


def test_an_end_for_good_is_told_as_such(endpoint: str) -> None:
    first, second = nodes(endpoint)
    meet(first, second)
    first.fail("3 steps in a row were not finite", for_good=True)
    assert second.hear(WITHIN_S) == (
        f"node 0 of the trainer {FOR_GOOD}3 steps in a row were not finite"
    )


def test_two_nodes_of_one_number_are_refused(endpoint: str) -> None:
    first, _ = nodes(endpoint)
    twin = FixedRendezvous(RankSpec(4, 2, 1, endpoint), "run")
    again = FixedRendezvous(RankSpec(4, 2, 1, endpoint), "run")
    meet(first, twin)
    with pytest.raises(ConfigError, match="two nodes 1 of the trainer"):
        again.next_rendezvous()


def test_nodes_that_disagree_are_refused(endpoint: str) -> None:
    first, second = nodes(endpoint)
    other = FixedRendezvous(RankSpec(8, 2, 1, endpoint), "run")
    meet(first, second)
    with pytest.raises(ConfigError, match="has 2 nodes of 8 ranks, another one has 2 nodes of 4"):
        other.next_rendezvous()
