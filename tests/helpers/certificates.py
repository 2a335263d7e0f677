"""Certificates for tests: authorities, the files that a node is given, and what strangers have."""

from __future__ import annotations

import datetime
import itertools
import ssl
from dataclasses import dataclass
from pathlib import Path

import trustme
from tests.helpers.nodes import KEY

from ratchet.transport.mailbox.credentials import Credentials, TlsContexts, open_credentials

_LONG_AGO = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class Files:
    """Paths, as a configuration names them."""

    ca: str
    cert: str
    key: str


class Authority:
    """Signs the certificates of one run, and writes them into a directory."""

    def __init__(self, directory: Path) -> None:
        self._ca = trustme.CA()
        self._directory = directory
        self._numbers = itertools.count()
        self._id = id(self)

    def sign(self, *, expired: bool = False) -> Files:
        """Make the files of one node."""
        end = _LONG_AGO + datetime.timedelta(days=1)
        leaf = (
            self._ca.issue_cert("node", not_before=_LONG_AGO, not_after=end)
            if expired
            else self._ca.issue_cert("node")
        )
        stem = self._directory / f"{self._id}-{next(self._numbers)}"
        files = Files(f"{stem}.ca", f"{stem}.cert", f"{stem}.key")
        self._ca.cert_pem.write_to_path(files.ca)
        Path(files.cert).write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
        leaf.private_key_pem.write_to_path(files.key)
        Path(files.key).chmod(0o600)
        return files

    def credentials(self) -> Credentials:
        """What a node of this run holds."""
        return open_credentials(None, self.sign())


def careless(*, trusts: Files, shows: Files | None) -> Credentials:
    """What somebody holds who has looked at none of it."""
    contexts = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(trusts.ca)
        if shows is not None:
            context.load_cert_chain(shows.cert, shows.key)
        contexts.append(context)
    return Credentials(KEY, TlsContexts(*contexts))
