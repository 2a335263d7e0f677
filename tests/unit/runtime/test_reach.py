"""Addresses of a node: what is whose, and what is refused."""

from __future__ import annotations

import socket
import stat
import threading
from pathlib import Path

import pytest
from tests.helpers.config import small_config

from ratchet.config import RuntimeConfig
from ratchet.errors import ConfigError
from ratchet.runtime import reach
from ratchet.runtime.reach import (
    check_safe,
    is_local,
    listening_address,
    own_host,
    own_token_file,
    registry_address,
)
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import load_token

OPEN = small_config().runtime
ELSEWHERE = "192.0.2.1"  # TEST-NET-1: nobody's


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A name service of the test's own."""
    known = {"head": ["127.0.0.5"], "far": [ELSEWHERE]}

    def getaddrinfo(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        addresses = known.get(host)
        if addresses is None:
            addresses = [host] if host[0].isdigit() or ":" in host else []
        if not addresses:
            raise socket.gaierror(-2, "unknown")
        return [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


def test_the_registry_is_given_as_host_and_port() -> None:
    assert registry_address("node-1:7000") == Address("tcp", "node-1", 7000)
    assert registry_address("[::1]:7000") == Address("tcp", "::1", 7000)
    for text in ("node-1", "node-1:", "0.0.0.0:7000", "a b:1"):
        with pytest.raises(ConfigError, match="--registry"):
            registry_address(text)


def test_a_registry_listens_where_its_name_leads_if_that_is_here(
    names: dict[str, list[str]],
) -> None:
    assert listening_address(Address("tcp", "head", 7), None) == Address("tcp", "127.0.0.5", 7)
    # a name of a service, say, that leads elsewhere
    assert listening_address(Address("tcp", "far", 7), "127.0.0.2") == Address(
        "tcp", "127.0.0.2", 7
    )
    with pytest.raises(ConfigError, match=f"far is {ELSEWHERE}, and none of it is of this machine"):
        listening_address(Address("tcp", "far", 7), None)
    with pytest.raises(ConfigError, match="no address that is known here"):
        listening_address(Address("tcp", "nowhere", 7), None)


def test_a_node_listens_at_its_address_towards_the_registry(
    names: dict[str, list[str]],
) -> None:
    assert own_host(Address("tcp", ELSEWHERE, 7), "10.0.0.7") == "10.0.0.7"  # as configured
    assert own_host(Address("tcp", "head", 7), "127.0.0.1") == "127.0.0.1"
    assert own_host(Address("tcp", "nowhere", 7), "127.0.0.1") == "127.0.0.1"


def test_a_route_to_elsewhere_starts_at_an_address_of_this_machine() -> None:
    host = own_host(Address("tcp", ELSEWHERE, 7), "127.0.0.1")
    with socket.socket() as probe:  # the loopback address where this machine has no route
        probe.bind((host, 0))


def test_only_loopback_is_local(names: dict[str, list[str]]) -> None:
    assert is_local("127.0.0.1")
    assert is_local("head")
    assert not is_local("far")
    assert not is_local("nowhere")  # nobody knows what it will be
    names["both"] = ["127.0.0.1", ELSEWHERE]
    assert not is_local("both")


def test_an_address_that_others_reach_needs_a_secret(names: dict[str, list[str]]) -> None:
    check_safe(OPEN, registry="head", host="127.0.0.1")
    for option, hosts in (
        ("registry", {"registry": "far", "host": "127.0.0.1"}),
        ("host", {"registry": "head", "host": ELSEWHERE}),
    ):
        with pytest.raises(ConfigError) as caught:
            check_safe(OPEN, **hosts)
        for word in (f"--{option} {hosts[option]}", "--token-file", "--tls-ca", "127.0.0.1"):
            assert word in str(caught.value)
    check_safe(RuntimeConfig(token_file="x"), registry="far", host=ELSEWHERE)


def test_one_user_has_one_token_on_a_machine_whoever_asks_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    start = threading.Barrier(8)
    paths: list[str] = []
    keys: set[bytes] = set()

    def ask() -> None:
        start.wait()
        path = own_token_file()
        paths.append(path)
        keys.add(load_token(path))  # which refuses what others could read

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 8
    assert set(paths) == {str(tmp_path / "ratchet" / "token")}
    assert len(keys) == 1
    assert stat.S_IMODE(Path(paths[0]).stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "ratchet").iterdir()] == ["token"]


def test_where_no_token_can_be_made_the_way_out_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ratchet").write_text("a file")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="give --token-file"):
        own_token_file()


def test_a_name_that_is_not_known_is_no_address() -> None:
    assert reach.resolve("no-such-host.invalid") == []
