"""What a process listens at."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

import psutil


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
