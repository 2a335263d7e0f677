"""What a node must hold to be let in: the token of the run, or a certificate of its authority.

Consumes files, checks them, produces `Credentials`; waits for nothing. With a token the hello
proves it and nothing is encrypted. With TLS both ends also show a certificate that the run's own
authority has signed, and everything is encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from ratchet.errors import ConfigError

_MIN_TOKEN_BYTES: Final = 16
_MAX_FILE_BYTES: Final = 1 << 20
_FIELD: Final = "runtime.token_file"
_RECIPE: Final = 'python -c "import secrets; print(secrets.token_hex(32))" > FILE; chmod 600 FILE'


class TlsFiles(Protocol):
    """Paths of PEM files."""

    @property
    def ca(self) -> str:
        """Certificate of the run's authority."""
        ...

    @property
    def cert(self) -> str:
        """This node's certificate, signed by it."""
        ...

    @property
    def key(self) -> str:
        """This node's private key."""
        ...


@dataclass(frozen=True)
class TlsContexts:
    """One node's certificate and whom it trusts, for both roles that it can have."""

    server: ssl.SSLContext
    client: ssl.SSLContext


@dataclass(frozen=True)
class Credentials:
    """The right to open a door that other machines can reach."""

    key: bytes = field(repr=False)
    """what the hello proves; give it to `Node`"""
    tls: TlsContexts | None = None
    """what TCP is wrapped in; the `SocketWire` that has the credentials uses it"""


def open_credentials(token_file: str | None, tls_files: TlsFiles | None) -> Credentials:
    """Read and check what the configuration names.

    Raises:
        ConfigError: neither is given, or one of them cannot be used; the text says what to do.
    """
    tls = None if tls_files is None else load_tls(tls_files.ca, tls_files.cert, tls_files.key)
    if token_file is not None:
        return Credentials(load_token(token_file), tls)
    if tls is None:
        msg = (
            f"{_FIELD} and runtime.tls are both missing, and nothing keeps strangers out: "
            f"give one of them, the same on every node; {_RECIPE}"
        )
        raise ConfigError(msg)
    return Credentials(key_of(tls), tls)


def load_token(path: str) -> bytes:
    """Return the 32-byte key that a token file stands for.

    Raises:
        ConfigError: the file is not a private one of ours, or its token is too short.
    """
    token = read_private(path, _FIELD, f"make one: {_RECIPE}").strip()
    if len(token) < _MIN_TOKEN_BYTES:
        msg = (
            f"{_FIELD} = {path!r}: the token has {len(token)} bytes and needs at least "
            f"{_MIN_TOKEN_BYTES}; make one: {_RECIPE}"
        )
        raise ConfigError(msg)
    return _derive(token, b"token")


def key_of(tls: TlsContexts) -> bytes:
    """Return a key for the hello of a run that has TLS and no token.

    It is derived from the certificate of the authority, which is no secret. The hello is then a
    formality, and what authenticates both ends is the TLS below it: so such a key must never be
    used on a TCP port without `tls`.
    """
    authorities = sorted(tls.client.get_ca_certs(binary_form=True))
    return _derive(b"".join(authorities), b"authority")


def load_tls(ca: str, cert: str, key: str) -> TlsContexts:
    """Load this node's certificate and the authority, and show the one to the other.

    Raises:
        ConfigError: a file is missing or is not what it should be, the private key is open to
            others, or another node would refuse the certificate.
    """
    # ssl reads the key on its own: this is for the checks
    read_private(key, "runtime.tls.key", "give the private key of this node's certificate")
    contexts = TlsContexts(
        _make_context(ssl.PROTOCOL_TLS_SERVER, ca, cert, key),
        _make_context(ssl.PROTOCOL_TLS_CLIENT, ca, cert, key),
    )
    _check_against_itself(contexts, ca, cert)
    return contexts


def _make_context(protocol: int, ca: str, cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Nodes are called by the names of their roles, and their addresses change with each start. The
    # authority signs nothing but the nodes of this run: its signature is all that there is to ask.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # a link lives long, and is never resumed
    _explained(lambda: context.load_verify_locations(cafile=ca), "runtime.tls.ca", ca)
    if not context.get_ca_certs():
        msg = f"runtime.tls.ca = {ca!r} has no certificate of an authority (CA:TRUE) in it"
        raise ConfigError(msg)
    _explained(
        lambda: context.load_cert_chain(cert, key, password=_refuse_to_ask),
        "runtime.tls.cert",
        cert,
    )
    return context


def _check_against_itself(contexts: TlsContexts, ca: str, cert: str) -> None:
    """Shake hands with itself in memory: what fails here would fail with every other node."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = contexts.client.wrap_bio(to_client, to_server)
    server = contexts.server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        msg = (
            f"runtime.tls.cert = {cert!r} would be refused by the other nodes, which trust "
            f"runtime.tls.ca = {ca!r}: {explain(error)}"
        )
        raise ConfigError(msg) from None


def explain(error: ssl.SSLError) -> str:
    """Return what OpenSSL has to say, without the places in its source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return (error.reason or str(error)).lower().replace("_", " ")


def _explained(load: Callable[[], None], name: str, path: str) -> None:
    try:
        load()
    except ssl.SSLError as error:
        msg = f"{name} = {path!r} cannot be used as PEM: {explain(error)}"
        raise ConfigError(msg) from None
    except OSError as error:
        msg = f"{name} = {path!r} cannot be read: {error.strerror}"
        raise ConfigError(msg) from None


def _refuse_to_ask() -> str:
    msg = "runtime.tls.key is encrypted, and nobody is there to be asked for its password"
    raise ConfigError(msg)


def read_private(path: str, name: str, way_out: str) -> bytes:
    """Read a file that nobody else can read or write. Checks what it has opened, not the path."""
    try:
        # a pipe without a writer would block for ever
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        problem: str | None = f"cannot be read: {error.strerror}"
    else:
        try:
            problem = _why_not_private(os.fstat(file))
            if problem is None:
                return os.read(file, _MAX_FILE_BYTES)
        finally:
            os.close(file)
    msg = f"{name} = {path!r} {problem}; {way_out}"
    raise ConfigError(msg)


def _why_not_private(found: os.stat_result) -> str | None:
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid} and not to {os.geteuid()}, who runs this"
    mode = stat.S_IMODE(found.st_mode)
    if mode & ~0o600:
        return f"has mode {mode:04o} and must have 0600: chmod 600 it"
    return None


def _derive(secret: bytes, purpose: bytes) -> bytes:
    """HKDF (RFC 5869) with SHA-256 and one block of output."""
    extracted = hmac.digest(b"ratchet mailbox key", secret, "sha256")
    return hmac.digest(extracted, purpose + b"\x01", "sha256")
