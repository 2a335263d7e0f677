"""Servers that somebody else has started: found behind a router, and waited for.

Consumes the router and `[rollout.sglang]`, produces URLs that are what the configuration would have
allowed. Waits for a router to know servers, and for servers to answer, up to `start_timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from pydantic import ValidationError

from ratchet.backends.rollout.sglang.client import CallFailed, CallRefused, SGLangClient
from ratchet.config.sglang import SGLangConfig
from ratchet.errors import ConfigError, EngineLost

_AGAIN_S: Final = 0.25
"""Pause before another try."""


class _Worker(msgspec.Struct):
    url: str


class _Workers(msgspec.Struct):
    """What a router answers at /workers."""

    workers: list[_Worker]


class _Urls(msgspec.Struct):
    """What an older one answers at /list_workers."""

    urls: list[str]


async def servers_behind(router: SGLangClient, config: SGLangConfig) -> Sequence[str]:
    """Return the URLs of the servers that a router knows; one that has just started knows none for
    a while.

    Raises:
        ConfigError: if it tells none, or some that could not stand in rollout.sglang.servers.
        EngineLost: if it is not there in time.
    """
    timeout_s = config.start_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                if urls := await _listed(router, timeout_s):
                    return _checked(config, urls)
                await asyncio.sleep(_AGAIN_S)
    except TimeoutError:
        msg = (
            f"rollout.sglang.router = {router.url!r} had no servers within {timeout_s:g} s"
            " (rollout.sglang.start_timeout_s); start it with --worker-urls, or name them in"
            " rollout.sglang.servers"
        )
        raise ConfigError(msg) from None


def _checked(config: SGLangConfig, urls: Sequence[str]) -> Sequence[str]:
    """Return the servers that a router names, if they could stand in rollout.sglang.servers: keys
    go to them just the same.
    """
    try:
        return SGLangConfig(**{**config.model_dump(), "servers": tuple(urls)}).servers
    except ValidationError as error:
        msg = (
            f"rollout.sglang.router = {config.router!r} names servers that are not used:"
            f" {error.errors()[0]['msg']}; or name rollout.sglang.servers"
        )
        raise ConfigError(msg) from None


async def _listed(router: SGLangClient, timeout_s: float) -> list[str]:
    path = "/workers"
    answer = await _answered(router, path, timeout_s)
    try:
        if answer is not None:
            return [worker.url for worker in msgspec.convert(answer, _Workers).workers]
        path = "/list_workers"  # of a router before 0.2.2
        answer = await router.call("GET", path, repeat="always")
        return msgspec.convert(answer, _Urls).urls
    except (CallFailed, msgspec.ValidationError) as error:
        msg = (
            f"rollout.sglang.router = {router.url!r} does not tell its servers: {path}: {error};"
            " is it one, and is rollout.sglang.api_key_file its key? Or name rollout.sglang.servers"
        )
        raise ConfigError(msg) from None


async def until_there(servers: Sequence[SGLangClient], timeout_s: float) -> None:
    """Wait for servers that somebody else starts; one that an engine before us has left paused is
    there, though it is not healthy.

    Raises:
        EngineLost: if one is not there in time.
    """
    await asyncio.gather(*(_answered(server, "/model_info", timeout_s) for server in servers))


async def _answered(server: SGLangClient, path: str, timeout_s: float) -> Any:
    """Return the first answer; None for a refusal, which is for those who ask on."""
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    return await server.call("GET", path, repeat="always")
                except CallRefused:
                    return None
                except CallFailed:  # not there yet
                    await asyncio.sleep(_AGAIN_S)
    except TimeoutError:
        msg = (
            f"the SGLang server at {server.url} was not there within {timeout_s:g} s"
            " (rollout.sglang.start_timeout_s)"
        )
        raise EngineLost(msg) from None
