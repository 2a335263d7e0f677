"""A registry on a real socket, on a loop of its own, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from tests.helpers.actors import RecordingLog, make_system

from ratchet.actors.version_registry import VersionRegistry
from ratchet.runtime.process_node import process_node
from ratchet.runtime.reporter import Reporter
from ratchet.storage.versions import VersionStore
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import Credentials, load_token
from ratchet.transport.mailbox.wire import SocketWire
from ratchet.types import RoleInfo


def secret(path: Path, text: str = "ab" * 32) -> Path:
    """Write a token file."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path


class RunningRegistry:
    """The registry of run-7, with a reporter."""

    def __init__(self, address: str, secret: Path | Credentials) -> None:
        self.address = address
        self._credentials = (
            Credentials(load_token(str(secret))) if isinstance(secret, Path) else secret
        )
        self.log = RecordingLog()
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._up.wait(20)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        system = make_system(log=self.log)
        node = process_node(
            system,
            "registry",
            "life-1",
            address=Address.parse(self.address),
            key=self._credentials.key,
            run_id="run-7",
            wire=SocketWire(self._credentials),
        )
        system.links = node.links
        await node.start()
        self.address = str(node.address)
        store = VersionStore.open(None, run="run-7")
        ref = VersionRegistry.start(system, "registry", store=store, run_name="sums")
        role = RoleInfo("registry", "registry", "life-1")
        reporter = Reporter(system, role, every_s=0.05, open_asks=node.waits)
        reporter.start()
        self._up.set()
        await self._end.wait()
        reporter.stop()
        await ref.stop(block=False)
        await node.stop(1.0)

    def end(self) -> None:
        """Begin to stop, from any thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._end.set)

    def stop(self) -> None:
        """Stop. Idempotent."""
        self.end()
        self._thread.join()
