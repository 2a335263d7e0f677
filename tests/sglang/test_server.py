"""The life and end of a real server, and what is found out about it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
from tests.helpers.sglang_server import sglang_config

from ratchet.backends.rollout.sglang.client import SGLangClient
from ratchet.backends.rollout.sglang.fleet import open_fleet
from ratchet.backends.rollout.sglang.temperature import next_logprobs
from ratchet.config.sglang import SGLangConfig

if TYPE_CHECKING:
    from tests.helpers.sglang_server import RealServer

API, ADMIN = "an-api-key-of-the-run", "an-admin-key-of-the-run"


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(650):
            await test

    asyncio.run(bounded())


def test_a_running_server_is_watched(real_server: RealServer, tmp_path: Path) -> None:
    async def scenario() -> None:
        config = SGLangConfig(servers=(real_server.url,), health_s=8.0)
        fleet = await open_fleet(
            config, model=real_server.model, dtype="float32", lora=None, log=tmp_path / "log"
        )
        (member,) = fleet.members
        assert (member.tp, member.context) == (1, 4096)
        client, paused = member.client, True
        looks = asyncio.Queue[str | None]()

        def serving() -> str | None:
            looks.put_nowait(None if paused else "7")
            return None if paused else "7"

        watch = asyncio.create_task(fleet.watch(serving))
        try:
            await client.set_version("7")
            await client.pause("in_place")
            await client.resume()
            paused = False
            seen = 0
            while seen < 3:  # the last of them has come, so those before it have found nothing
                seen += await looks.get() == "7"
            assert not watch.done()
            await client.set_version("default")  # as after a start
            assert "holds weights 'default', and it was given '7'" in str(await watch)
        finally:
            watch.cancel()
            await fleet.close()

    run(scenario())


def test_the_temperature_is_in_what_a_server_says(real_server: RealServer) -> None:
    """So that the check of a start sees a server that leaves it out."""

    async def scenario() -> None:
        client = SGLangClient(real_server.url)
        try:
            cold, warm = await next_logprobs(client, 30)
        finally:
            await client.close()
        differences = [one - cold[0] for one in cold[1:]]
        assert max(map(abs, differences)) > 0.1
        halves = [two - warm[0] for two in warm[1:]]
        assert halves == pytest.approx([each / 2 for each in differences], abs=1e-4)

    run(scenario())


def test_a_launched_server_with_keys_that_loses_its_scheduler(
    real_model: Path, tmp_path: Path
) -> None:
    files = {"api_key_file": key_file(tmp_path, API), "admin_key_file": key_file(tmp_path, ADMIN)}

    async def scenario() -> None:
        log = tmp_path / "log"
        others = keepers()  # the server of the session has one
        fleet = await open_fleet(
            sglang_config(**files), model=real_model, dtype="float32", lora=None, log=log
        )
        try:
            (keeper,) = keepers() - others
            family = keeper.children(recursive=True)
            for each in (keeper, *family):
                seen = str(each.cmdline()) + str(each.environ())
                assert API not in seen
                assert ADMIN not in seen
            watch = asyncio.create_task(fleet.watch(lambda: None))
            next(each for each in family if "scheduler" in str(each.cmdline())).kill()
            assert str(await watch).startswith("the SGLang server died of signal")
            assert not any(each.is_running() for each in (keeper, *family))
            check_log(log)
        finally:
            await fleet.close()

    run(scenario())


def keepers() -> set[psutil.Process]:
    """The keepers of this process."""
    children = psutil.Process().children()
    return {each for each in children if "sglang.keeper" in str(each.cmdline())}


def key_file(folder: Path, key: str) -> str:
    path = folder / key
    path.touch(mode=0o600)
    path.write_text(key)
    return str(path)


def check_log(log: Path) -> None:
    text = log.read_text(errors="replace")
    assert "'api_key': '***'" in text
    assert API not in text
    assert ADMIN not in text
