"""What a guest of a run needs before it is in: a log, an event loop, and the way to the registry.

Consumes a run directory or an address, produces an `Invitation`. The loop runs in a thread of its
own, so that heartbeats and transfers go on while the user's code computes. Waits for the directory
to say where the registry is, as long as it is told to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from ratchet.config import TlsConfig
from ratchet.errors import ConfigError, RunFailed
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.placement import TlsFiles
from ratchet.runtime.rundir import Links, read_links
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import Credentials, open_credentials

T = TypeVar("T")

_POLL_S: Final = 0.05
_LOGGER: Final = logging.getLogger("ratchet")


class StandardLog:
    """Events as lines of the standard logger "ratchet": how a guest logs is the user's to say."""

    def debug(self, event: str, **fields: Any) -> None:
        """Log at level debug."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Log at level info."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log at level warning."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Log at level error."""
        self._log(logging.ERROR, event, fields)

    @staticmethod
    def _log(level: int, event: str, fields: dict[str, Any]) -> None:
        if _LOGGER.isEnabledFor(level):
            error = fields.pop("exc_info", None)
            text = " ".join((event, *(f"{name}={value!r}" for name, value in fields.items())))
            _LOGGER.log(level, "%s", text, exc_info=error)


class BackgroundLoop:
    """An event loop in a thread; calls from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="ratchet-guest", daemon=True)
        self._running = threading.Event()
        self._thread.start()
        self._running.wait()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._stopped())

    async def _stopped(self) -> None:
        self._stop = asyncio.Event()
        self._running.set()
        await self._stop.wait()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, and wait for it here; an interrupt here cancels it there."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, and await it on the caller's own loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @property
    def closed(self) -> bool:
        """It has ended."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the loop. Idempotent."""
        if not self.closed:
            with contextlib.suppress(RuntimeError):  # it ends by itself at this moment
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


@dataclass(frozen=True)
class Invitation:
    """How to reach a run, and with what."""

    registry: Address
    credentials: Credentials
    directory: RunDirectory | None
    """where the run lives, if this machine sees it"""
    host: str
    """this machine's address, as the registry's machine sees it"""


def find_run(
    run: str | Path,
    *,
    token_file: str | Path | None,
    tls: TlsConfig | None,
    host: str | None,
    timeout_s: float,
) -> Invitation:
    """Find the way to a run; its registry may still be about to start.

    Raises:
        ConfigError: if the run, its token or its certificates cannot be used.
        RunFailed: if the directory does not say within `timeout_s` where the registry is.
    """
    token = str(token_file) if token_file is not None else None
    files = TlsFiles(tls.ca, tls.cert, tls.key) if tls is not None else None
    directory = None
    if (root := Path(run)).is_dir():
        directory = RunDirectory(root.resolve())
        links = _read_links(directory, timeout_s)
        registry = Address.parse(links.registry)
        token, files = token or links.token_file, files or links.tls
    else:
        registry = _parse_address(str(run))
    credentials = open_credentials(token, files)
    return Invitation(registry, credentials, directory, host or _own_address(registry))


def _read_links(directory: RunDirectory, timeout_s: float) -> Links:
    until = time.monotonic() + timeout_s
    while (links := read_links(directory)) is None:
        if time.monotonic() > until:
            msg = (
                f"{directory.links} has not appeared within {timeout_s:g} s: start the run's"
                " registry, or give its address"
            )
            raise RunFailed(msg)
        time.sleep(_POLL_S)
    return links


def _parse_address(text: str) -> Address:
    try:
        return Address.parse(text if text.startswith(("unix:", "tcp:")) else f"tcp:{text}")
    except ConfigError as error:
        msg = (
            f"{text!r} is not the directory of a run, nor the address of a registry (HOST:PORT,"
            f" tcp:HOST:PORT or unix:/path): {error}"
        )
        raise ConfigError(msg) from None


def _own_address(registry: Address) -> str:
    """Return the address of the interface from which the registry is reached."""
    if registry.kind == "unix":
        return "127.0.0.1"
    try:
        found = socket.getaddrinfo(registry.host, registry.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:  # connects without a packet
            probe.connect(found[4])
            host: str = probe.getsockname()[0]
    except OSError as error:
        msg = f"the registry's machine {registry.host!r} cannot be reached: {error.strerror}"
        raise ConfigError(msg) from None
    return host
