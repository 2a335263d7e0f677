"""The configuration of one node: the file of the run, and what is different here.

Consumes the file and the options of `ratchet launch`, produces a `Config` whose `runtime` is this
node's, the address of the registry, and the name of the role. Waits for the name service only.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.actors.role import TRAINER, evaluator_name, rollout_name
from ratchet.config import Config, load_config, parse_config
from ratchet.errors import ConfigError
from ratchet.runtime.placement import RankSpec
from ratchet.runtime.reach import (
    check_safe,
    listening_address,
    own_host,
    own_token_file,
    registry_address,
)
from ratchet.transport.mailbox.address import Address
from ratchet.types import RoleKind


@dataclass(frozen=True)
class LaunchOptions:
    """What a user says of one node. The file of the run says the rest."""

    registry: str
    """HOST:PORT"""
    node_rank: int | None = None
    host: str | None = None
    """IP address of this machine that the others reach"""
    directory: Path | None = None
    token_file: str | None = None
    tls: Mapping[str, str] = field(default_factory=dict)
    """paths of PEM files: ca, cert, key"""
    overrides: Sequence[str] = ()
    num_nodes: int = 1
    """nodes of the trainer"""
    rendezvous: str | None = None
    """HOST:PORT where they meet"""
    standby: bool = False
    """a trainer that waits until another one is dead"""
    wait_s: float = 300.0
    """patience with a registry that is not there, or not there any more"""


def node_config(kind: RoleKind, path: Path, options: LaunchOptions) -> tuple[Config, Address]:
    """Resolve the configuration of a node, and where its registry is or, for itself, listens.

    Raises:
        ConfigError: if the file breaks a rule, an address is not of this machine, or one can be
            reached by strangers.
    """
    registry = registry_address(options.registry)
    config = load_config(path, [*options.overrides, *_secrets(options)])
    named = {"registry": registry.host}
    check_safe(config.runtime, **named if options.host is None else named | {"host": options.host})
    if kind == "registry":
        registry = listening_address(registry, options.host)
        host = registry.host
    else:
        host = options.host or own_host(registry, config.runtime.host)
    here: dict[str, Any] = {"host": host}
    if config.runtime.token_file is None and config.runtime.tls is None:
        here["token_file"] = own_token_file()
    return _with_runtime(config, here), registry


def _secrets(options: LaunchOptions) -> list[str]:
    """Return what keeps strangers out, as overrides of the file."""
    named = {f"tls.{name}": path for name, path in options.tls.items()}
    if options.token_file is not None:
        named["token_file"] = options.token_file
    return [f"runtime.{name}={json.dumps(path)}" for name, path in named.items()]


def _with_runtime(config: Config, values: Mapping[str, Any]) -> Config:
    data = config.model_dump(mode="json", exclude_none=True)
    data["runtime"] |= values
    return parse_config(data, source="ratchet launch")


def node_role(
    kind: RoleKind, options: LaunchOptions, ranks_per_node: int
) -> tuple[str, RankSpec | None]:
    """Return the role's name, and the ranks of a trainer that is more than one process.

    Raises:
        ConfigError: if an option is not for this role, or one is missing.
    """
    rank = options.node_rank
    if options.standby and (kind != "trainer" or options.num_nodes != 1):
        msg = f"--standby is for a trainer on one node, and not for the {kind}"
        if kind == "trainer":
            msg = f"--standby is for a trainer on one node, and --num-nodes is {options.num_nodes}"
        raise ConfigError(msg)
    if kind != "trainer":
        if options.num_nodes != 1 or options.rendezvous is not None:
            msg = f"--num-nodes and --rendezvous are for the trainer, and not for the {kind}"
            raise ConfigError(msg)
        if kind not in {"rollout", "evaluator"}:
            return kind, None
        # digits, as of a rank: whoever asks the logs for all of a kind finds it
        number = rank if rank is not None else 100_000 + secrets.randbelow(900_000)
        return (rollout_name if kind == "rollout" else evaluator_name)(number), None
    if options.num_nodes == 1:
        ranks = RankSpec(ranks_per_node) if ranks_per_node > 1 else None
        return TRAINER, ranks
    if rank is None or options.rendezvous is None or not 0 <= rank < options.num_nodes:
        msg = (
            f"--num-nodes {options.num_nodes} needs --rendezvous HOST:PORT, the same on every node"
            f" of the trainer, and --node-rank from 0 to {options.num_nodes - 1}"
        )
        raise ConfigError(msg)
    return f"trainer-{rank}", RankSpec(ranks_per_node, options.num_nodes, rank, options.rendezvous)
