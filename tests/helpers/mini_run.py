"""The parts of a run that a guest joins, in a thread of the test: registry, buffer, fake engines.

Links, stores, leases and the weight transport are the real ones; only the engines have no model.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config
from tests.helpers.scoring import SingleTurn

from ratchet.actors.actor import LocalRef
from ratchet.actors.buffer import BufferActor
from ratchet.actors.rollout import RolloutActor
from ratchet.actors.system import System
from ratchet.actors.version_registry import VersionRegistry
from ratchet.backends.rollout.fake import FakeEngine
from ratchet.config import Config
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.embed_link import BackgroundLoop
from ratchet.runtime.process_node import process_node
from ratchet.runtime.rundir import Links, create_run_directory, write_links
from ratchet.storage.groups import GroupRow, read_groups
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.versions import VersionStore
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import Credentials, load_token
from ratchet.transport.mailbox.node import Node
from ratchet.transport.mailbox.wire import SocketWire
from ratchet.transport.weights.registry import open_receiver
from ratchet.types import Prompt, RoleInfo, RoleKind


class Policy(torch.nn.Module):
    """The module whose weights a `FakeEngine` takes."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(size))


class RandomScorer(SingleTurn):
    """Rewards that differ within a group, so that none is dropped."""

    async def score(self, prompt: Prompt, completions: Sequence[str]) -> list[float]:
        del prompt
        return [float(index) for index in range(len(completions))]

    def close(self) -> None:
        pass


class MiniRun:
    """A run without a trainer."""

    def __init__(self, root: Path, *, num_rollouts: int = 1, **sections: Any) -> None:
        sections["buffer"] = {"batch_groups": 2, "max_staleness": 2} | sections.get("buffer", {})
        sections["rollout"] = {"group_size": 2, "max_tokens": 4} | sections.get("rollout", {})
        self.config: Config = small_config(**sections)
        self.directory: RunDirectory = create_run_directory(root / "run", self.config)
        self.log = RecordingLog()
        self.refs: dict[str, LocalRef] = {}
        self.nodes: dict[str, Node] = {}
        self._num_rollouts = num_rollouts
        self._sockets = tempfile.TemporaryDirectory(prefix="mini-")
        self.token_file = Path(self._sockets.name) / "token"
        self.token_file.touch(mode=0o600)
        self.token_file.write_text("a secret for the tests of guests")
        self._credentials = Credentials(load_token(str(self.token_file)))
        self.registry = Address("unix", f"{self._sockets.name}/registry.sock")
        self.background = BackgroundLoop()

    def __enter__(self) -> Self:
        self.background.call(self._start())
        links = Links(str(self.registry), "mini", str(self.token_file))
        write_links(self.directory, links)
        return self

    def __exit__(self, *_: object) -> None:
        self.background.call(self._stop())
        self.background.close()
        self._sockets.cleanup()

    async def _start(self) -> None:
        system, _ = await self._node("registry", "registry")
        store = VersionStore.open(self.directory.versions, run="mini")
        self.refs["registry"] = VersionRegistry.start(
            system, "registry", store=store, run_name="mini", config=self.config.to_toml()
        )
        system, role = await self._node("buffer", "buffer")
        prompts = [Prompt(f"p{number}", f"{number}>") for number in range(100)]
        ledger = GroupLedger.open(self.directory.ledger, run="mini")
        self.refs["buffer"] = BufferActor.start(
            system, role, config=self.config, prompts=prompts, ledger=ledger
        )
        for rank in range(self._num_rollouts):
            await self._start_rollout(rank)

    async def _start_rollout(self, rank: int) -> None:
        system, role = await self._node("rollout", f"rollout-{rank}")
        self.refs[role.name] = RolloutActor.start(
            system,
            role,
            config=self.config,
            engine=FakeEngine(delay_s=lambda *_: 0.002),
            receiver=open_receiver(self.config.weights),
            scorer=RandomScorer(),
            eval_prompts=(),
        )

    async def _node(self, kind: RoleKind, name: str) -> tuple[System, RoleInfo]:
        system = System(
            rng=random.Random(0),
            wall_time=time.time,
            new_id=lambda: uuid.uuid4().hex,
            log=self.log,
            ask_timeout_s=10.0,
        )
        incarnation = uuid.uuid4().hex[:12]
        node = process_node(
            system,
            name,
            incarnation,
            address=Address("unix", f"{self._sockets.name}/{name}.sock"),
            key=self._credentials.key,
            run_id="mini",
            wire=SocketWire(self._credentials),
        )
        system.book.learn("registry", str(self.registry))
        await node.start()
        self.nodes[name] = node
        return system, RoleInfo(kind, name, incarnation, str(node.address))

    async def _stop(self) -> None:
        for ref in reversed(self.refs.values()):
            await ref.stop(block=False)
        for node in self.nodes.values():
            await node.stop(0.5)

    def start_rollout(self, rank: int) -> None:
        """Let an engine join late."""
        self.background.call(self._start_rollout(rank))

    def groups(self) -> list[GroupRow]:
        """The ledger as it is on disk."""
        return list(read_groups(self.directory.ledger))


def step(policy: Policy, value: float) -> None:
    """What an optimiser does: change the weights in place."""
    with torch.no_grad():
        policy.w.fill_(value)


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    tick = threading.Event()
    while not condition():
        tick.wait(0.01)
