"""The client: what it sends, what it repeats, and how each failure is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.sglang_stub import SGLangStub

from ratchet.backends.rollout.sglang import http
from ratchet.backends.rollout.sglang.answers import decode_answer
from ratchet.backends.rollout.sglang.client import (
    CallRefused,
    ServerGone,
    SGLangClient,
    TooLate,
)
from ratchet.backends.rollout.sglang.http import RETRIES

BODY = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 3}, "rid": "r"}


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def connected(stub: SGLangStub, **keys: str) -> AsyncIterator[SGLangClient]:
    async with stub.serving(), open_client(stub.url, **keys) as client:
        yield client


@asynccontextmanager
async def open_client(url: str, **keys: str) -> AsyncIterator[SGLangClient]:
    client = SGLangClient(url, **keys)
    try:
        yield client
    finally:
        await client.close()


def test_generates_and_keeps_its_connection() -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with connected(stub) as client:
            for _ in range(3):
                answer = await client.generate(BODY, timeout_s=5)
                assert len(answer["output_ids"]) == 3
            assert stub.connections == 1

    run(scenario())


def test_each_call_has_the_body_that_the_server_reads() -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with connected(stub) as client:
            await client.pause("retract")
            await client.init_group(
                address="127.0.0.1", port=1, rank_offset=1, world_size=2, name="g", backend="gloo"
            )
            await client.begin_update()
            await client.update_from_group(
                names=["w"], dtypes=["float32"], shapes=[(2, 3)], group="g"
            )
            await client.end_update()
            await client.flush_cache()
            await client.set_version("5")
            await client.destroy_group("g")
            await client.resume()
            await client.abort("r")
            assert [path for path, _ in stub.calls] == [
                "/pause_generation",
                "/init_weights_update_group",
                "/begin_weight_update",
                "/update_weights_from_distributed",
                "/end_weight_update",
                "/flush_cache",
                "/update_weight_version",
                "/destroy_weights_update_group",
                "/continue_generation",
                "/abort_request",
            ]
            (update,) = stub.called("/update_weights_from_distributed")
            assert update["shapes"] == [[2, 3]]
            assert update["flush_cache"] is False  # the server's own default flushes
            assert stub.called("/update_weight_version")[0]["abort_all_requests"] is False
            assert stub.called("/abort_request")[0] == {"rid": "r", "abort_all": False}
            assert (await client.model_info())["weight_version"] == "5"

    run(scenario())


def test_each_kind_of_call_has_its_key() -> None:
    async def scenario() -> None:
        stub = SGLangStub(api_key="api", admin_key="admin")
        async with connected(stub, api_key="api", admin_key="admin") as client:
            await client.generate(BODY, timeout_s=5)
            await client.model_info()
            await client.pause("retract")
        stub = SGLangStub(api_key="api")
        async with connected(stub, api_key="api") as client:
            await client.pause("retract")

    run(scenario())


def test_a_wrong_key_is_refused_and_shown_nowhere() -> None:
    async def scenario() -> None:
        async with connected(SGLangStub(api_key="right"), api_key="wrong-key") as client:
            with pytest.raises(CallRefused, match="Unauthorized") as caught:
                await client.generate(BODY, timeout_s=5)
            assert caught.value.status == 401
            assert "wrong-key" not in str(caught.value)
            assert await client.healthy()  # it is open to everybody

    run(scenario())


def test_a_refusal_has_the_words_of_the_server() -> None:
    async def scenario() -> None:
        async with connected(SGLangStub()) as client:
            with pytest.raises(CallRefused, match="No weight update session is open") as caught:
                await client.end_update()
            assert caught.value.status == 400

    run(scenario())


def test_success_false_is_a_refusal_whatever_the_status() -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        stub.answers["/end_weight_update"] = (200, {"success": False, "message": "no"})
        async with connected(stub) as client:
            with pytest.raises(CallRefused, match="no"):
                await client.end_update()

    run(scenario())


def test_health_is_not_an_error_while_paused_but_another_refusal_is() -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with connected(stub) as client:
            assert await client.healthy()
            await client.pause("in_place")
            assert not await client.healthy()
            stub.answers["/health"] = (500, {})
            with pytest.raises(CallRefused):
                await client.healthy()

    run(scenario())


def test_a_hung_server_is_too_late() -> None:
    async def scenario() -> None:
        stub = SGLangStub(hung={"/generate", "/flush_cache"})
        async with connected(stub) as client:
            with pytest.raises(TooLate, match=r"/generate: no answer within 0\.05 s"):
                await client.generate(BODY, timeout_s=0.05)
            assert len(stub.called("/generate")) == 1
            with pytest.raises(TooLate):
                await client.control("/flush_cache", {}, timeout_s=0.05, repeat="always")

    run(scenario())


def test_a_generation_that_breaks_is_not_repeated_and_a_pause_is() -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        stub.dies.update({"/generate": 1, "/pause_generation": 2, "/begin_weight_update": 1})
        async with connected(stub) as client:
            with pytest.raises(ServerGone) as caught:
                await client.generate(BODY, timeout_s=5)
            assert caught.value.sent
            assert len(stub.called("/generate")) == 1
            with pytest.raises(ServerGone):
                await client.begin_update()
            await client.pause("retract")
            assert len(stub.called("/pause_generation")) == 3

    run(scenario())


def test_repeats_have_an_end() -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        stub.dies["/pause_generation"] = 100
        async with connected(stub) as client:
            with pytest.raises(ServerGone):
                await client.pause("retract")
            assert len(stub.called("/pause_generation")) == RETRIES + 1

    run(scenario())


def test_what_no_server_has_seen_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with stub.serving():
            port = int(stub.url.rpartition(":")[2])
        async with open_client(stub.url) as client, AsyncExitStack() as stack:

            async def serve_meanwhile(_: float) -> None:
                await stack.enter_async_context(stub.serving(port))

            patched = SimpleNamespace(sleep=serve_meanwhile, timeout=asyncio.timeout)
            monkeypatch.setattr("ratchet.backends.rollout.sglang.http.asyncio", patched)
            answer = await client.generate(BODY, timeout_s=10)
            assert len(answer["output_ids"]) == 3

    run(scenario())


def test_no_server_is_gone_and_not_sent() -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with stub.serving():
            pass
        async with open_client(stub.url) as client:
            with pytest.raises(ServerGone) as caught:
                await client.generate(BODY, timeout_s=10)
            assert not caught.value.sent

    run(scenario())


def test_an_answer_of_another_shape_is_a_refusal() -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        stub.answers["/generate"] = (200, {"output_ids": "none"})
        async with connected(stub) as client:
            with pytest.raises(CallRefused, match="not the answer"):
                await client.generate(BODY, timeout_s=5, decode=decode_answer)

    run(scenario())


def test_an_answer_that_is_larger_than_any_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with connected(stub := SGLangStub()) as client:
            stub.answers["/model_info"] = (200, {"text": "x" * 2000})
            assert len((await client.model_info())["text"]) == 2000
            monkeypatch.setattr(http, "_LARGEST_BYTES", 1000)
            with pytest.raises(CallRefused, match="longer than 1000 bytes"):
                await client.model_info()

    run(scenario())


def test_closing_ends_what_is_in_flight() -> None:
    async def scenario() -> None:
        stub = SGLangStub(hung={"/generate"})
        async with connected(stub) as client:
            task = asyncio.create_task(client.generate(BODY, timeout_s=20))
            await stub.until(lambda: bool(stub.called("/generate")))
            await client.close()
            with pytest.raises(ServerGone):
                await task
            with pytest.raises(ServerGone, match="closed"):
                await client.model_info()
            await client.close()

    run(scenario())


def test_a_proxy_of_the_environment_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def scenario() -> None:
        async with connected(SGLangStub()) as client:
            assert await client.healthy()

    run(scenario())
