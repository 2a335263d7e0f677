"""Servers that a router names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.sglang_stub import SGLangStub
from tests.unit.backends.rollout.sglang.test_fleet import ADMIN, key_file, opened, run

from ratchet.errors import ConfigError


def test_servers_are_found_behind_a_router(model: Path) -> None:
    async def scenario() -> None:
        stubs = SGLangStub(), SGLangStub(), SGLangStub()
        async with stubs[0].serving() as router, stubs[1].serving() as a, stubs[2].serving() as b:
            router.behind = [a.url, f"{b.url}/"]
            async with opened(model, router=router.url) as fleet:
                assert [member.client.url for member in fleet.members] == [a.url, b.url]
                assert fleet.generation.url == router.url
            router.behind = []
            with pytest.raises(ConfigError, match=r"had no servers within 0\.1 s .*--worker-urls"):
                async with opened(model, router=router.url, start_timeout_s=0.1):
                    pass
            router.answers["/workers"] = (404, {})  # an older one
            with pytest.raises(ConfigError, match="does not tell its servers"):
                async with opened(model, router=router.url):
                    pass
            router.answers["/list_workers"] = (200, {"urls": [a.url]})
            async with opened(model, router=router.url) as fleet:
                assert [member.client.url for member in fleet.members] == [a.url]

    run(scenario())


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://192.0.2.1:30000", "192.0.2.1:30000' is on another host.*api_key_file"),
        (
            "http://127.0.0.1:30000@0",
            "30000@0' is not a server's URL",
        ),  # of a router with --dp-aware
        ("grpc://127.0.0.1:30000", "'grpc://127.0.0.1:30000' is not a server's URL"),
    ],
)
def test_what_a_router_names_is_checked_before_it_is_sent_a_key(
    model: Path, tmp_path: Path, url: str, problem: str
) -> None:
    async def scenario() -> None:
        async with SGLangStub(behind=[url]).serving() as router:
            admin = key_file(tmp_path, ADMIN)
            with pytest.raises(ConfigError, match=problem) as raised:
                async with opened(
                    model, router=router.url, admin_key_file=admin, start_timeout_s=2.0
                ):
                    pass
            assert f"rollout.sglang.router = {router.url!r} names" in str(raised.value)
            assert str(raised.value).endswith("or name rollout.sglang.servers")

    run(scenario())


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ({"/workers": (200, [])}, "/workers: Expected `object`, got `array`"),
        ({"/workers": (200, {"workers": [{}]})}, "/workers: .*missing required field `url`"),
        ({"/workers": (404, {}), "/list_workers": (200, {})}, "/list_workers: .*field `urls`"),
    ],
)
def test_a_router_that_answers_something_else_is_told_of(
    model: Path, answers: dict[str, tuple[int, Any]], told: str
) -> None:
    async def scenario() -> None:
        async with SGLangStub(answers=answers).serving() as router:
            with pytest.raises(ConfigError, match=f"does not tell its servers: {told}"):
                async with opened(model, router=router.url):
                    pass

    run(scenario())


def test_a_router_that_has_just_started_is_waited_for(model: Path) -> None:
    async def scenario() -> None:
        router, server = SGLangStub(), SGLangStub()
        async with router.serving(), server.serving():

            async def register() -> None:
                await router.until_called("/workers")
                router.behind = [server.url]

            registers = asyncio.create_task(register())
            async with opened(model, router=router.url) as fleet:
                assert [member.client.url for member in fleet.members] == [server.url]
            await registers

    run(scenario())
