"""Dials a peer for as long as there is a reason to, with backoff.

Consumes the address of the peer, produces a connection or a verdict. Waits for the peer's listener;
unblocked by it, by the peer's own dial to us, or when nothing waits for the peer any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from ratchet.errors import ProtocolError, RatchetError
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.hello import Refused
from ratchet.transport.mailbox.hub import Hub
from ratchet.transport.mailbox.limits import Limits

_YIELD_S: Final = 0.05


class Target(Protocol):
    """Whoever is dialled."""

    name: str

    def on_absent(self) -> None:
        """Nobody is at the address."""
        ...

    def on_refused(self, error: RatchetError) -> None:
        """Dialling again would end in the same way."""
        ...


class Dialler:
    """One per peer; at most one dial at a time."""

    def __init__(
        self, target: Target, hub: Hub, limits: Limits, wanted: Callable[[], bool]
    ) -> None:
        self._target = target
        self._hub = hub
        self._limits = limits
        self._wanted = wanted
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self.last_error = "it was never reached"
        """for people to read"""
        self.at: Address | None = None
        """where it was dialled last; None if nobody knew"""

    def start(self, *, yielding: bool = False) -> None:
        """Dial until there is a connection; `yielding` lets the other end go first."""
        if self._task is None and not self._stopped:
            dial = self._dial(_YIELD_S if yielding else 0.0)
            self._task = asyncio.get_running_loop().create_task(
                dial, name=f"dial {self._target.name}"
            )

    async def stop(self) -> None:
        """Dial no more."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _dial(self, delay_s: float) -> None:
        backoff_s = self._limits.dial_first_s
        try:
            await asyncio.sleep(delay_s)
            while self._wanted():
                if not await self._dial_once():
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, self._limits.dial_most_s)
        finally:
            self._task = None

    async def _dial_once(self) -> bool:
        self.at = self._hub.where(self._target.name)
        try:
            async with asyncio.timeout(self._limits.hello_s):
                await self._hub.dial(self._target.name)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            self.last_error = str(error)
            self._target.on_absent()
        except Refused as refusal:
            self.last_error = str(refusal)
            if refusal.final:
                self._target.on_refused(refusal.as_error())
            elif refusal.kind == "name":
                self._target.on_absent()
        except ProtocolError as error:  # whoever answers there, it is no node
            self.last_error = f"{type(error).__name__}: {error}"
            self._target.on_absent()
        except (OSError, TimeoutError, LookupError) as error:
            self.last_error = f"{type(error).__name__}: {error}"
        except RatchetError as error:  # there is no way to where it listens
            self._target.on_refused(error)
        else:
            return True
        return False
