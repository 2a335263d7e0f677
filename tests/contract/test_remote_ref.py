"""The contract of refs, over a link: two nodes in one loop, on a Unix socket, TCP, and TLS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.contract.ref_suite import RefSuite, Stage
from tests.helpers.actors import make_system
from tests.helpers.certificates import Authority
from tests.helpers.nodes import KEY

from ratchet.actors.actor import Actor
from ratchet.actors.system import System
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.base import Ref
from ratchet.transport.mailbox.credentials import Credentials
from ratchet.transport.mailbox.node import Node
from ratchet.transport.mailbox.wire import SocketWire, Wire


@asynccontextmanager
async def linked(
    addresses: dict[str, Address], wires: dict[str, Wire] | None = None
) -> AsyncIterator[Stage]:
    """A system behind each of two nodes, "caller" and "target"."""
    nodes: dict[str, Node] = {}

    def build(name: str) -> System:
        system = make_system()
        nodes[name] = system.remote = Node(
            name=name,
            incarnation=f"{name}-1",
            address=addresses[name],
            key=KEY,
            run_id="run",
            local=system.local,
            locate=lambda wanted: nodes[wanted].address,
            dead_letters=system.dead_letters,
            new_id=lambda: f"{name}-{system.new_id()}",
            random_bytes=system.rng.randbytes,
            log=system.log,
            wire=None if wires is None else wires[name],
        )
        return system

    caller, target = build("caller"), build("target")

    async def start(actor_class: type[Actor[Any]], name: str) -> Ref:
        actor_class.start(target, name)
        return caller.ref(name)

    for node in nodes.values():
        await node.start()
    yield Stage(caller, target, start)
    for node in nodes.values():
        await node.stop(1.0)


class TestUnixSocket(RefSuite):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def stage(self) -> AbstractAsyncContextManager[Stage]:
        return linked(
            {
                "caller": Address.parse(f"unix:{self.directory}/caller"),
                "target": Address.parse(f"unix:{self.directory}/target"),
            }
        )


ANYWHERE = {name: Address.parse("tcp:127.0.0.1:0") for name in ("caller", "target")}


class TestTcp(RefSuite):
    def stage(self) -> AbstractAsyncContextManager[Stage]:
        return linked(ANYWHERE)


class TestTls(RefSuite):
    @pytest.fixture(autouse=True)
    def _certificates(self, tls_wires: dict[str, Wire]) -> None:
        self.wires = tls_wires

    def stage(self) -> AbstractAsyncContextManager[Stage]:
        return linked(ANYWHERE, self.wires)


@pytest.fixture(scope="module")
def tls_wires(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wire]:
    """Each node has a certificate of its own."""
    authority = Authority(tmp_path_factory.mktemp("authority"))
    return {name: SocketWire(Credentials(KEY, authority.credentials().tls)) for name in ANYWHERE}
