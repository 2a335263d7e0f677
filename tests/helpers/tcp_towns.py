"""Nodes on real TCP sockets, with or without TLS, and what they ask each other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from tests.helpers.nodes import Host, Town, stopping

from ratchet.messages import BurnVersion
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.wire import SocketWire

ANYWHERE = Address.parse("tcp:127.0.0.1:0")
PLAIN = SocketWire()


def over_tcp(scene: Callable[[Town], Coroutine[Any, Any, None]], **limits: Any) -> None:
    async def play() -> None:
        problems: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
        async with (
            asyncio.timeout(30),
            stopping(Town(lambda name: ANYWHERE, Limits(**limits))) as t,
        ):
            await scene(t)
        assert not problems

    asyncio.run(play())


def ask(host: Host, name: str, number: int = 1) -> Any:
    return host.node.ref(name).ask(BurnVersion(0, number, ""), block=False, timeout=20.0)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - of what has no event, such as a log
        await asyncio.sleep(0.001)
