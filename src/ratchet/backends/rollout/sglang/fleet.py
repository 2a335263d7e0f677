"""The SGLang servers of one engine: launched, attached to, or found behind a router; and watched.

Consumes `[rollout.sglang]` and the model; produces clients of servers that are what the run needs
them to be, and `EngineLost` when one of them no longer is. Waits for servers to start, up to
`start_timeout_s`; the watch waits for the end of a launched server, which the kernel tells, and
looks at each of them again and again. A server that is dead, hung, or holds other weights than it
should is never mended here: the worker ends with the reason, is started again, and its new engine
takes the live version as any late one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ratchet.backends.rollout.sglang.attach import servers_behind, until_there
from ratchet.backends.rollout.sglang.checks import check_server
from ratchet.backends.rollout.sglang.client import (
    CallFailed,
    CallRefused,
    ServerGone,
    SGLangClient,
    TooLate,
)
from ratchet.backends.rollout.sglang.keys import read_keys
from ratchet.backends.rollout.sglang.server import SGLangServer
from ratchet.backends.rollout.sglang.temperature import check_temperature
from ratchet.config import LoraConfig
from ratchet.config.sglang import SGLangConfig
from ratchet.errors import ConfigError, EngineLost

_LOOKS: Final = 4
"""Looks at each server in `health_s`."""
_AGAIN_S: Final = 0.25
"""Pause before another look at a server that is not healthy."""


class Member(NamedTuple):
    """One server, and what was found out about it."""

    client: SGLangClient
    tp: int
    """ranks that share the weights, each of which joins a group of a weight update"""
    context: int
    """tokens of its context, or of its cache if that is smaller"""


class Fleet:
    """Servers that serve the same weights. Made by `open_fleet`; closed by whoever has it.

    Attributes:
        members: every server: control goes to each of them.
        generation: where generation goes: the router, or the only server.
    """

    def __init__(
        self,
        config: SGLangConfig,
        members: Sequence[Member],
        generation: SGLangClient,
        launched: SGLangServer | None,
    ) -> None:
        self.members = tuple(members)
        self.generation = generation
        self._health_s = config.health_s
        self._launched = launched

    async def close(self) -> None:
        """End what was launched, and leave the rest as it is. Idempotent."""
        clients = {self.generation, *(member.client for member in self.members)}
        await asyncio.gather(*(client.close() for client in clients))
        if self._launched is not None:
            await self._launched.stop()

    async def watch(self, serving: Callable[[], str | None]) -> EngineLost:
        """Wait until a server is lost; return what happened to which.

        Args:
            serving: what every server should name as its weights at this moment; None while they
                are paused, load, or hold no version, when only the end of a process counts.
        """
        looks = [self._look_after(member.client, serving) for member in self.members]
        if self._launched is not None:
            looks.append(self._launched.ended())
        tasks = [asyncio.ensure_future(look) for look in looks]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return EngineLost(done.pop().result())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _look_after(self, client: SGLangClient, serving: Callable[[], str | None]) -> str:
        while True:
            await asyncio.sleep(self._health_s / _LOOKS)
            expected = serving()
            if expected is None:
                continue
            found = await self._look(client, expected, serving)
            if found is not None and serving() == expected:  # not paused or updated meanwhile
                return f"the SGLang server at {client.url} {found}"

    async def _look(
        self, client: SGLangClient, expected: str, serving: Callable[[], str | None]
    ) -> str | None:
        """Return what is wrong, if anything is."""
        try:
            async with asyncio.timeout(self._health_s):
                while not await client.healthy(timeout_s=self._health_s):
                    if serving() != expected:
                        return None
                    await asyncio.sleep(_AGAIN_S)
                info = await client.model_info(timeout_s=self._health_s)
        except (TimeoutError, TooLate):
            return (
                f"hangs: it was not healthy within {self._health_s:g} s (rollout.sglang.health_s)"
            )
        except ServerGone as error:
            return f"is gone: {error}"
        except CallRefused as error:
            return f"is ill: {error}"
        if not isinstance(info, dict) or "weight_version" not in info:
            return "does not say in /model_info which weights it holds (weight_version)"
        version = info["weight_version"]
        if version != expected:
            return (
                f"says that it holds weights {version!r}, and it was given {expected!r}: was it"
                " started again, or updated by somebody else?"
            )
        return None


async def open_fleet(
    config: SGLangConfig, *, model: Path, dtype: str, lora: LoraConfig | None, log: Path
) -> Fleet:
    """Launch or attach, and check what was found.

    Args:
        config: of the servers.
        model: directory of the model of the run.
        dtype: of its weights.
        lora: of the adapters that will be loaded.
        log: where the output of a launched server goes.

    Raises:
        ConfigError: if the user has to mend something; the text says what.
        EngineLost: if a server does not respond in time, or ends while it starts.
    """
    keys = read_keys(config)
    launched: SGLangServer | None = None
    clients: list[SGLangClient] = []

    def connect(url: str) -> SGLangClient:
        timeout_s = config.control_timeout_s
        client = SGLangClient(
            url, api_key=keys.api, admin_key=keys.admin, control_timeout_s=timeout_s
        )
        clients.append(client)
        return client

    try:
        urls: Sequence[str] = config.servers
        router = None if config.router is None else connect(config.router)
        if router is not None and not urls:
            urls = await servers_behind(router, config)
        if not urls:
            launched = SGLangServer(config, model=model, dtype=dtype, lora=lora, keys=keys, log=log)
            launched.launch()
            urls = [launched.url]
        servers = [connect(url) for url in urls]
        if launched is not None:
            await launched.ready(servers[0], config.start_timeout_s)
        else:
            await until_there(servers, config.start_timeout_s)
        infos = [await _facts(client) for client in servers]
        members = [
            Member(
                client,
                *check_server(client.url, info, model=model, dtype=dtype, lora=lora is not None),
            )
            for client, info in zip(servers, infos, strict=True)
        ]
        for client in servers:
            await check_temperature(client, config.control_timeout_s)
        return Fleet(config, members, router or servers[0], launched)
    except BaseException:
        await asyncio.gather(*(client.close() for client in clients))
        if launched is not None:
            await launched.stop()
        raise


async def _facts(server: SGLangClient) -> Mapping[str, Any]:
    """Return what a server says of itself, and show that it takes our keys."""
    field = "api_key_file"
    try:
        told = [await server.server_info(), await server.model_info()]
        if not all(isinstance(each, dict) for each in told):
            raise ConfigError(f"what answers at {server.url} is no SGLang server")
        facts = {name: value for each in told for name, value in each.items()}
        field = "admin_key_file"
        await server.abort("ratchet-looks-in")  # the least that needs the key of control
    except CallRefused as error:
        if error.status not in {401, 403}:
            raise EngineLost(str(error)) from error
        msg = f"the SGLang server at {server.url} does not take the key of rollout.sglang.{field}"
        raise ConfigError(msg) from None
    except CallFailed as error:
        raise EngineLost(str(error)) from error
    return facts
