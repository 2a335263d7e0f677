"""Which roles of a run are started on this machine, and what each process is told.

Consumes a configuration and the secret of the run, produces one `RoleSpec` per process; waits for
nothing. A `ratchet run` places all roles here, at Unix sockets; `ratchet launch` places one, at a
TCP port of this machine, and names the registry of another.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ratchet.config import Config, parse_config
from ratchet.transport.mailbox.address import Address
from ratchet.types import RoleInfo, RoleKind


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths of PEM files: the run's authority, this node's certificate, and its private key."""

    ca: str
    cert: str
    key: str


class RankSpec(msgspec.Struct, frozen=True):
    """The ranks of a trainer that is more than one process."""

    ranks_per_node: int
    num_nodes: int = 1
    node_rank: int = 0
    rendezvous: str = ""
    """ "HOST:PORT" where the nodes of the trainer meet; only with several nodes"""


class RoleSpec(msgspec.Struct, frozen=True):
    """What the launcher tells a new process."""

    role: RoleInfo
    run_dir: str
    run_id: str
    listen: str
    """address; the port may be 0"""
    registry: str
    """address of the registry; for the registry itself, where it listens"""
    key: str
    """hex"""
    config: str = ""
    """resolved, TOML, of this node; several nodes may share one run directory"""
    token_file: str | None = None
    """where others find the key, as the registry notes in links.json"""
    tls: TlsFiles | None = None
    ranks: RankSpec | None = None
    start_step: int | None = None
    """of the checkpoint that a trainer goes on from; by default the newest, if there is one"""
    level: str = "info"

    def load_config(self) -> Config:
        """Read the configuration of this node back."""
        return parse_config(tomllib.loads(self.config))


@dataclass(frozen=True)
class Placement:
    """The roles of this machine."""

    roles: tuple[tuple[RoleKind, str], ...]
    """kind and name, in the order of their start"""
    run_dir: Path
    run_id: str
    registry: Address
    key: bytes = field(repr=False)
    sockets: Path | None = None
    """directory of mode 0700 for Unix sockets; else roles listen on `host`"""
    host: str = "127.0.0.1"
    config: str = ""
    token_file: Path | None = None
    tls: TlsFiles | None = None
    ranks: RankSpec | None = None
    start_step: int | None = None

    def spec(self, kind: RoleKind, name: str, incarnation: str) -> RoleSpec:
        """Return what the process of a role is told."""
        return RoleSpec(
            role=RoleInfo(kind, name, incarnation),
            run_dir=str(self.run_dir),
            run_id=self.run_id,
            listen=str(self.registry if kind == "registry" else self._listen(name)),
            registry=str(self.registry),
            key=self.key.hex(),
            config=self.config,
            token_file=str(self.token_file) if self.token_file is not None else None,
            tls=self.tls,
            ranks=self.ranks if kind == "trainer" else None,
            start_step=self.start_step if kind == "trainer" else None,
        )

    def _listen(self, name: str) -> Address:
        if self.sockets is not None:
            return Address("unix", f"{self.sockets}/{name}.sock")
        return Address("tcp", self.host, 0)
