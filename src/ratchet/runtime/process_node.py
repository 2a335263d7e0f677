"""The one system and the one node of a process: what its actors share, and the end of its links.

Consumes a configuration, and what a role, a guest or a visitor is called; produces a `System`, and
a `Node` that is not started yet. Waits for nothing.
"""

from __future__ import annotations

import os
import random
import time
import uuid
from typing import Final

from ratchet.actors.system import System
from ratchet.config import Config
from ratchet.observability.logs import Log
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.node import Node
from ratchet.transport.mailbox.wire import Wire

STANDARD: Final = Limits()


def role_system(config: Config, name: str, log: Log) -> System:
    """Return what the role of that name shares with the rest of its process."""
    return System(
        rng=random.Random(f"{config.seed}/{name}"),  # noqa: S311
        wall_time=time.time,
        new_id=lambda: uuid.uuid4().hex,
        log=log,
        ask_timeout_s=config.runtime.ask_timeout_s,
        registry_wait_s=config.runtime.registry_wait_s,
    )


def limits_of(config: Config) -> Limits:
    """Return the times of all links of a run."""
    runtime = config.runtime
    return Limits(
        heartbeat_s=runtime.heartbeat_s,
        suspect_s=runtime.suspect_s,
        dead_s=runtime.dead_s,
        delivery_s=runtime.ask_timeout_s,
    )


def process_node(
    system: System,
    name: str,
    incarnation: str,
    *,
    address: Address | None,
    key: bytes,
    run_id: str,
    wire: Wire,
    limits: Limits = STANDARD,
) -> Node:
    """Make the node of a system; the arguments are those of `Node`."""
    node = Node(
        name=name,
        incarnation=incarnation,
        address=address,
        key=key,
        run_id=run_id,
        local=system.local,
        locate=system.book.locate,
        is_newest=system.book.is_newest,
        dead_letters=system.dead_letters,
        new_id=system.new_id,
        random_bytes=os.urandom,
        log=system.log,
        limits=limits,
        wire=wire,
    )
    system.remote = node
    return node
