"""All servers of an engine, or an error that names those that did not do it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from tests.helpers.sglang_stub import SGLangStub

from ratchet.backends.rollout.sglang.client import SGLangClient
from ratchet.backends.rollout.sglang.session import UpdateSession
from ratchet.errors import TransferFailed
from ratchet.transport.weights.base import TensorSpec

SPECS = [TensorSpec("b", "float32", (2, 3)), TensorSpec("a", "bfloat16", (4,))]


def run(
    body: Callable[[UpdateSession, list[SGLangStub]], Awaitable[None]], timeout_s: float = 5.0
) -> None:
    """Run a test on a session with two servers."""

    async def main() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(20):
            stubs = [await stack.enter_async_context(SGLangStub().serving()) for _ in range(2)]
            clients = [SGLangClient(stub.url, control_timeout_s=timeout_s) for stub in stubs]
            for client in clients:
                stack.push_async_callback(client.close)
            await body(UpdateSession(clients), stubs)

    asyncio.run(main())


def test_a_session_reaches_every_server_and_aborts_nothing() -> None:
    async def body(session: UpdateSession, stubs: list[SGLangStub]) -> None:
        for stub in stubs:
            stub.groups.add("g")
        await session.pause("retract")
        await session.begin()
        await session.update(SPECS, "g", timeout_s=5)
        await session.end()
        await session.flush()
        await session.set_version(7)
        await session.resume()
        for stub in stubs:
            assert [path for path, _ in stub.calls] == [
                "/pause_generation",
                "/begin_weight_update",
                "/update_weights_from_distributed",
                "/end_weight_update",
                "/flush_cache",
                "/update_weight_version",
                "/continue_generation",
            ]
            assert stub.called("/pause_generation") == [{"mode": "retract"}]
            (update,) = stub.called("/update_weights_from_distributed")
            assert update["load_format"] == "flattened_bucket"
            assert update["names"] == ["b", "a"]  # in the order of the bytes
            assert update["dtypes"] == ["float32", "bfloat16"]
            assert update["shapes"] == [[2, 3], [4]]
            assert update["flush_cache"] is False
            (named,) = stub.called("/update_weight_version")
            assert named == {"new_version": "7", "abort_all_requests": False}

    run(body)


def test_a_session_that_a_failed_load_left_open_is_closed_first() -> None:
    async def body(session: UpdateSession, stubs: list[SGLangStub]) -> None:
        stubs[0].updating = True
        await session.pause("in_place")
        await session.begin()
        assert [stub.updating for stub in stubs] == [True, True]
        assert len(stubs[0].called("/begin_weight_update")) == 2
        assert len(stubs[1].called("/begin_weight_update")) == 1
        await session.end()
        await session.end()  # there is none any more
        assert len(stubs[1].called("/end_weight_update")) == 1

    run(body)


def test_every_server_that_refuses_is_named() -> None:
    async def body(session: UpdateSession, stubs: list[SGLangStub]) -> None:
        refusal = {"success": False, "message": "no room"}
        stubs[0].answers["/flush_cache"] = (400, refusal)
        stubs[1].answers["/flush_cache"] = (200, refusal)  # the status says nothing
        with pytest.raises(TransferFailed) as caught:
            await session.flush()
        assert stubs[0].url in str(caught.value)
        assert stubs[1].url in str(caught.value)
        assert str(caught.value).count("no room") == 2

    run(body)


def test_a_server_that_hangs_is_not_waited_for_longer_than_the_deadline() -> None:
    async def body(session: UpdateSession, stubs: list[SGLangStub]) -> None:
        stubs[0].hung.add("/pause_generation")
        with pytest.raises(TransferFailed, match=r"no answer within 1 s") as caught:
            await session.pause("retract")
        assert stubs[1].url not in str(caught.value)
        assert stubs[1].paused

    run(body, timeout_s=1.0)  # enough for the other one on a loaded machine


def test_an_adapter_is_forgotten_however_long_its_requests_take() -> None:
    async def body(session: UpdateSession, stubs: list[SGLangStub]) -> None:
        await session.load_adapter("a", "/folder")
        stubs[0].hung.add("/unload_lora_adapter")
        unloading = asyncio.create_task(session.unload_adapter("a"))
        await stubs[0].until_called("/unload_lora_adapter", 2)
        assert not unloading.done()
        stubs[0].hung.clear()
        await stubs[0].notify()
        await unloading
        assert [stub.adapters for stub in stubs] == [{}, {}]

    run(body, timeout_s=0.3)  # of each try
