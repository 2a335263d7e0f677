"""Scenes between nodes in virtual time, on a network in memory, and what they say to each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tests.helpers.nodes import MemoryWire, Town, memory_town, stopping
from tests.simulation.loop import run_virtual

from ratchet.messages import AbortLoad, BurnVersion, PromptsClaimed, VersionBurnt
from ratchet.transport.mailbox.base import Ref
from ratchet.transport.mailbox.limits import Limits
from ratchet.types import Assignment, Prompt


def note(number: int) -> AbortLoad:
    return AbortLoad(0, number, "note")


def bulk(number: int, size: int = 0, **metadata: Any) -> PromptsClaimed:
    prompt = Prompt("p", "x" * size, metadata=metadata)
    return PromptsClaimed("i", (Assignment(number, 0, 0, prompt, 1, 1.0),))


def ask(ref: Ref, number: int = 0, timeout: float = 10.0) -> Awaitable[VersionBurnt]:
    return ref.ask(BurnVersion(0, number, "ask"), block=False, timeout=timeout)


def echo(message: BurnVersion) -> VersionBurnt:
    return VersionBurnt(message.version)


def numbers(told: list[Any]) -> list[int]:
    return [m.version if isinstance(m, AbortLoad) else m.assignments[0].group_id for m in told]


def virtual(
    scene: Callable[[Town], Coroutine[Any, Any, None]], limits: Limits | None = None
) -> None:
    async def play() -> None:
        async with asyncio.timeout(3600), stopping(memory_town(limits or Limits())) as town:
            await scene(town)

    run_virtual(play())


def cut(town: Town) -> None:
    assert isinstance(town.wire, MemoryWire)
    town.wire.cut()
