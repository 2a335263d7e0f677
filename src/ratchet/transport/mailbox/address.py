"""Where a node listens: a Unix socket, or a TCP port of one interface.

Consumes the text form, produces a checked `Address`; waits for nothing.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ratchet.errors import ConfigError

_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
# The last label has a letter: to a resolver "0" and "0x0" are old ways to write an IP address, and
# that one is every interface.
_NAME = re.compile(rf"(?=.{{1,253}}$)({_LABEL}\.)*(?!0[xX])(?![0-9]+$){_LABEL}")
_UNIX_PATH_BYTES = 107  # sun_path of Linux, less its closing zero


@dataclass(frozen=True)
class Address:
    """`unix:/absolute/path` or `tcp:HOST:PORT`; at port 0 the system chooses one. HOST is an IP
    address, or where one dials a name; it is never every interface.
    """

    kind: Literal["unix", "tcp"]
    host: str
    """the socket's path, the IP address, or the name of a machine"""
    port: int = 0

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read the text form.

        Raises:
            ConfigError: the text is not an address, or stands for every interface.
        """
        kind, _, rest = text.partition(":")
        if kind == "unix":
            return cls._parse_unix(text, rest)
        if kind == "tcp":
            return cls._parse_tcp(text, rest)
        msg = f"address {text!r} is neither unix:/absolute/path nor tcp:HOST:PORT"
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
        if not (host and port.isascii() and port.isdecimal()):
            msg = f"address {text!r} is not of the form tcp:HOST:PORT"
            raise ConfigError(msg)
        number = int(port)
        ip = _ip(host)
        if ip is not None and ip.is_unspecified:
            msg = f"address {text!r} is every interface; name the one that others reach"
            raise ConfigError(msg)
        if ip is None and not _NAME.fullmatch(host):
            msg = f"address {text!r}: {host!r} is neither an IP address nor the name of a machine"
            raise ConfigError(msg)
        if not 0 <= number <= 0xFFFF:
            msg = f"address {text!r}: the port must be from 0 to 65535"
            raise ConfigError(msg)
        return cls("tcp", host, number)

    @property
    def is_local(self) -> bool:
        """Only this machine can reach it."""
        ip = _ip(self.host)
        return self.kind == "unix" or (ip is not None and ip.is_loopback)

    @property
    def is_name(self) -> bool:
        """The name of a machine: one may dial it and not listen there."""
        return self.kind == "tcp" and _ip(self.host) is None

    def known_as(self, before: Address | None) -> Address:
        """Return where others look for it since it was there, if any port of this host will do."""
        if before is None or self.kind != "tcp" or self.port or self != replace(before, port=0):
            return self
        return before

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp:{host}:{self.port}"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return mapped or ip
