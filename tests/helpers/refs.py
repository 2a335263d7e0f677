"""The actors around the one under test: they note what they are told and answer by script."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ratchet.messages import Message
from ratchet.transport.mailbox.base import Recipient


class RecordedRef:
    """Notes what it is told, and whoever watches."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[Message] = []
        self.watchers: list[Recipient] = []
        self.answer: Callable[[Any], Message | Awaitable[Message]] | None = None

    def tell(self, message: Message) -> None:
        self.told.append(message)

    def ask(self, message: Any, *, block: bool = False, timeout: float) -> Any:
        del block
        self.told.append(message)
        return self._reply(message, timeout)

    async def _reply(self, message: Any, timeout: float) -> Message:
        await asyncio.sleep(0)
        if self.answer is None:
            raise AssertionError(f"{self.name} was asked {message} within {timeout} s")
        reply = self.answer(message)
        return reply if isinstance(reply, Message) else await reply

    def watch(self, watcher: Recipient) -> None:
        self.watchers.append(watcher)

    def of(self, kind: type) -> list[Any]:
        """What it was told of one type."""
        return [message for message in self.told if isinstance(message, kind)]


class RecordedDirectory:
    """A ref for every name, made when it is first asked for."""

    def __init__(self) -> None:
        self.refs: dict[str, RecordedRef] = {}

    def ref(self, name: str) -> RecordedRef:
        return self.refs.setdefault(name, RecordedRef(name))
