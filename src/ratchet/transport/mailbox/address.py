"""Where a node listens: a Unix socket, or a TCP port of the loopback interface.

Consumes the text form, produces a checked `Address`; waits for nothing.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ratchet.errors import ConfigError

_UNIX_PATH_BYTES = 107  # sun_path of Linux, less its closing zero


@dataclass(frozen=True)
class Address:
    """`unix:/absolute/path` or `tcp:HOST:PORT`, HOST a loopback address; at port 0 the system
    chooses one.
    """

    kind: Literal["unix", "tcp"]
    host: str
    """the socket's path, or the IP address"""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read the text form.

        Raises:
            ConfigError: the text is not an address, or one that other machines could reach.
        """
        kind, _, rest = text.partition(":")
        if kind == "unix":
            return cls._parse_unix(text, rest)
        if kind == "tcp":
            return cls._parse_tcp(text, rest)
        msg = f"address {text!r} is neither unix:/absolute/path nor tcp:127.0.0.1:PORT"
        raise ConfigError(msg)

    @classmethod
    def _parse_unix(cls, text: str, path: str) -> Address:
        if not Path(path).is_absolute():
            msg = f"address {text!r}: a Unix socket needs an absolute path, unix:/path"
            raise ConfigError(msg)
        if len(path.encode()) > _UNIX_PATH_BYTES:
            msg = (
                f"address {text!r}: the path has {len(path.encode())} bytes and the system allows "
                f"{_UNIX_PATH_BYTES}; choose a shorter directory, or tcp:127.0.0.1:0"
            )
            raise ConfigError(msg)
        return cls("unix", path)

    @classmethod
    def _parse_tcp(cls, text: str, rest: str) -> Address:
        host, _, port = rest.rpartition(":")
        host = "127.0.0.1" if host == "localhost" else host.removeprefix("[").removesuffix("]")
        try:
            number = int(port)
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            msg = f"address {text!r} is not of the form tcp:127.0.0.1:PORT"
            raise ConfigError(msg) from None
        if not loopback:
            msg = (
                f"address {text!r} is not a loopback address, and links are not encrypted: "
                f"use tcp:127.0.0.1:{port} or unix:/path"
            )
            raise ConfigError(msg)
        if not 0 <= number <= 0xFFFF:
            msg = f"address {text!r}: the port must be from 0 to 65535"
            raise ConfigError(msg)
        return cls("tcp", host, number)

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"
