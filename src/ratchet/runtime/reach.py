"""Where a launched role listens, where its registry is, and what keeps strangers out.

Consumes what the user typed and the configuration, produces addresses and credentials, or a
`ConfigError` that says what to do. Waits for the name service only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import tempfile
from pathlib import Path
from typing import Final

from ratchet.config import RuntimeConfig
from ratchet.errors import ConfigError
from ratchet.transport.mailbox.address import Address

_NO_SUCH_PORT: Final = 9
"""A datagram socket is connected to it, to learn which address of ours leads there; no packet is
sent."""


def registry_address(text: str) -> Address:
    """Read HOST:PORT.

    Raises:
        ConfigError: if it is not that.
    """
    try:
        return Address.parse(f"tcp:{text}")
    except ConfigError as error:
        msg = f"--registry {text!r} is not of the form HOST:PORT: {error}"
        raise ConfigError(msg) from None


def listening_address(registry: Address, host: str | None) -> Address:
    """Return where the registry itself listens: at `host`, else where its own name leads.

    Raises:
        ConfigError: if that is not an address of this machine.
    """
    if host is not None:
        return Address("tcp", host, registry.port)
    found = resolve(registry.host)
    mine = [address for address in found if _is_mine(address)]
    if not mine:
        msg = (
            f"--registry {registry.host} is {', '.join(found) or 'no address that is known here'},"
            " and none of it is of this machine: the registry listens there itself; give an"
            " address of this machine, or --host"
        )
        raise ConfigError(msg)
    return Address("tcp", mine[0], registry.port)


def own_host(registry: Address, configured: str) -> str:
    """Return the address of this machine that the other roles reach: the configured one, unless
    that is a loopback address and the registry is elsewhere.
    """
    if not ipaddress.ip_address(configured).is_loopback:
        return configured
    for address in resolve(registry.host):
        if ipaddress.ip_address(address).is_loopback:
            return configured
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, registry.port or _NO_SUCH_PORT))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return configured


def resolve(host: str) -> list[str]:
    """Return the IP addresses of a name, none if it is not known (yet)."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def is_local(host: str) -> bool:
    """Whether only this machine can be meant."""
    found = resolve(host)
    return bool(found) and all(ipaddress.ip_address(address).is_loopback for address in found)


def check_safe(runtime: RuntimeConfig, **addresses: str) -> None:
    """Refuse an address that other machines reach, if nothing keeps strangers out.

    Args:
        runtime: with the token file and the certificates, if there are any.
        addresses: hosts, by the option that names them.

    Raises:
        ConfigError: which option it is, and what to do.
    """
    if runtime.token_file is not None or runtime.tls is not None:
        return
    for option, host in addresses.items():
        if not is_local(host):
            msg = (
                f"--{option} {host} can be reached from other machines, and nothing keeps strangers"
                " out: give --token-file FILE (a secret of mode 0600, the same on every node; make"
                ' one with python -c "import secrets; print(secrets.token_hex(32))" > FILE; chmod'
                " 600 FILE), or --tls-ca, --tls-cert and --tls-key, or use 127.0.0.1"
            )
            raise ConfigError(msg)


def own_token_file() -> str:
    """Return the token file of this user on this machine, made when it is first asked for: the
    roles that one user launches at loopback addresses find each other, and nobody else gets in.

    Raises:
        ConfigError: if it cannot be made.
    """
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "ratchet" / "token"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                new = Path(folder) / "token"
                new.touch(mode=0o600)
                new.write_text(secrets.token_hex(32) + "\n", encoding="ascii")
                with contextlib.suppress(FileExistsError):  # another launcher was first
                    path.hardlink_to(new)
    except OSError as error:
        msg = f"cannot make {path}, the secret of your runs: {error.strerror}; give --token-file"
        raise ConfigError(msg) from None
    return str(path)


def _is_mine(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
