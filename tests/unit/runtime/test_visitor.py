"""A visitor waits for a registry, or says at once that there is none, and can end its run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.running_registry import RunningRegistry, secret

from ratchet.errors import AuthFailed
from ratchet.messages import EndRun
from ratchet.runtime.visitor import NotReached, Visit, visit
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.credentials import load_token


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return secret(tmp_path / "token")


@pytest.fixture
def address(tmp_path: Path) -> str:
    (tmp_path / "s").mkdir(mode=0o700)
    return f"unix:{tmp_path}/s/registry.sock"


def visiting(address: str, token: Path, body: Callable[[Visit], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(30),
            visit(
                Address.parse(address), key=load_token(str(token)), log=RecordingLog()
            ) as open_visit,
        ):
            await body(open_visit)

    asyncio.run(main())


def test_one_that_waits_is_answered_when_the_registry_comes_up(address: str, token: Path) -> None:
    running: list[RunningRegistry] = []

    async def body(found: Visit) -> None:
        asked = asyncio.create_task(found.describe(20.0))
        await found.dials.refused.wait()
        running.append(await asyncio.to_thread(RunningRegistry, address, token))
        described = await asked
        assert (described.run_id, described.status.name) == ("run-7", "sums")
        assert (await found.describe_now(20.0)).run_id == "run-7"

    try:
        visiting(address, token, body)
    finally:
        for registry in running:
            registry.stop()


def test_one_that_does_not_wait_hears_at_once_that_nobody_is_there(
    address: str, token: Path
) -> None:
    async def body(found: Visit) -> None:
        began = asyncio.get_running_loop().time()
        with pytest.raises(NotReached, match=f"nobody listens at {address}"):
            await found.describe_now(20.0)
        assert asyncio.get_running_loop().time() - began < 10.0

    visiting(address, token, body)


def test_the_end_of_a_run_is_delivered_before_the_visit_closes(address: str, token: Path) -> None:
    registry = RunningRegistry(address, token)

    async def body(found: Visit) -> None:
        found.end_run(EndRun("somebody", "stopped", "enough"))

    try:
        visiting(address, token, body)
    finally:
        registry.stop()
    (ended,) = registry.log.named("run_ended")
    assert (ended["by"], ended["reason"]) == ("somebody", "enough")


def test_a_stranger_is_told_that_it_is_one(address: str, token: Path, tmp_path: Path) -> None:
    registry = RunningRegistry(address, token)

    async def body(found: Visit) -> None:
        for ask in (found.describe, found.describe_now):
            with pytest.raises(AuthFailed):
                await ask(20.0)

    try:
        visiting(address, secret(tmp_path / "other", "cd" * 32), body)
    finally:
        registry.stop()
