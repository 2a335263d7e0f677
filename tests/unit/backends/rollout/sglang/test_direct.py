"""What servers are told in a transfer that they take part in themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config
from tests.helpers.sglang_stub import SGLangStub
from tests.helpers.tiny_models import write_tiny_model

from ratchet.backends.rollout.base import SamplingParams
from ratchet.backends.rollout.sglang import direct
from ratchet.backends.rollout.sglang.client import SGLangClient
from ratchet.backends.rollout.sglang.direct import DirectWeights
from ratchet.backends.rollout.sglang.engine import SGLangEngine
from ratchet.errors import TransferFailed
from ratchet.transport.weights.base import ProbedSink, TensorSpec
from ratchet.transport.weights.outside import DirectSink, Meeting
from ratchet.types import TensorSlot

SPECS = (TensorSpec("a", "float32", (2,)), TensorSpec("b", "bfloat16", (3, 1)))
SLOTS = (
    TensorSlot("a", "float32", (2,), 0, 0, 8),
    TensorSlot("b", "bfloat16", (3, 1), 0, 64, 6),
)
MEETING = Meeting("127.0.0.1", 4, "g.1", 3, "gloo")


class Setup:
    def __init__(self, stubs: list[SGLangStub], weights: DirectWeights) -> None:
        self.stubs, self.weights = stubs, weights
        self.said: list[str] = []


def run(test: Callable[[Setup], Awaitable[None]], timeout_s: float = 5.0) -> None:
    async def scenario() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(30):
            stubs = [await stack.enter_async_context(SGLangStub().serving()) for _ in range(2)]
            clients = [SGLangClient(stub.url) for stub in stubs]
            said: list[str] = []
            weights = DirectWeights(
                clients,
                [1, 2],
                SPECS,
                hold=lambda: said.append("hold"),
                lost=said.append,
                tolerance=0.1,
                timeout_s=timeout_s,
            )
            for client in clients:
                stack.push_async_callback(client.close)
            setup = Setup(stubs, weights)
            setup.said = said
            await test(setup)

    asyncio.run(scenario())


def test_an_engine_offers_its_servers_and_their_ranks() -> None:
    async def test(setup: Setup) -> None:
        assert isinstance(setup.weights, DirectSink)
        assert isinstance(setup.weights, ProbedSink)
        assert setup.weights.outside.sizes == (1, 2)

    run(test)


def test_one_server_joins_takes_a_bucket_and_leaves() -> None:
    async def test(setup: Setup) -> None:
        servers, stub = setup.weights.outside, setup.stubs[1]
        await servers.join(1, MEETING, 5.0)
        await servers.begin()
        await servers.load(1, "g.1", SLOTS, 5.0)
        await servers.release(1, "g.1")
        (joined,) = stub.called("/init_weights_update_group")
        assert joined == {
            "master_address": "127.0.0.1",
            "master_port": 4,
            "rank_offset": 1,
            "world_size": 3,
            "group_name": "g.1",
            "backend": "gloo",
        }
        (loaded,) = stub.called("/update_weights_from_distributed")
        assert loaded["names"] == ["a", "b"]
        assert loaded["shapes"] == [[2], [3, 1]]
        assert loaded["load_format"] == "flattened_bucket"
        assert not loaded["flush_cache"]
        assert "weight_version" not in loaded
        assert stub.groups == set()
        assert [path for path, _ in setup.stubs[0].calls] == ["/begin_weight_update"]

    run(test)


def test_the_engine_holds_no_version_from_the_first_bucket_on() -> None:
    async def test(setup: Setup) -> None:
        setup.weights.version = 3
        await setup.weights.begin()
        assert setup.weights.version is None
        assert setup.said == ["hold"]
        await setup.weights.resume()
        assert not setup.stubs[0].called("/continue_generation"), "it stays paused"

    run(test)


def test_what_a_server_refuses_is_said() -> None:
    async def test(setup: Setup) -> None:
        message = {"success": False, "message": "no such address"}
        setup.stubs[0].answers["/init_weights_update_group"] = (400, message)
        with pytest.raises(TransferFailed, match="no such address"):
            await setup.weights.join(0, MEETING, 5.0)

    run(test)


def test_nothing_passes_through_the_worker() -> None:
    async def test(setup: Setup) -> None:
        with pytest.raises(TransferFailed, match=r"rollout\.sglang\.transfer"):
            await setup.weights.write({})
        assert not setup.stubs[0].calls

    run(test)


def test_a_server_that_never_leaves_its_group_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "LEAVE_S", 0.05)

    async def test(setup: Setup) -> None:
        path = "/destroy_weights_update_group"
        setup.stubs[0].hung.add(path)
        for _ in range(2):
            assert setup.said == []
            with pytest.raises(TransferFailed, match="hangs"):
                await setup.weights.release(0, "g.0")
        (said,) = setup.said
        assert setup.stubs[0].url in said

    run(test, timeout_s=0.0)


@pytest.mark.parametrize("answer", ["unknown", "broken"])
def test_a_server_that_was_started_again_is_in_no_group(answer: Any) -> None:
    async def test(setup: Setup) -> None:
        path = "/destroy_weights_update_group"
        if answer == "broken":
            setup.stubs[0].dies[path] = 10
        await setup.weights.release(0, "g.0")
        assert setup.stubs[0].called(path)
        assert setup.said == []

    run(test)


@pytest.mark.parametrize("transfer", ["direct", "relay"])
def test_an_engine_is_what_its_configuration_says(transfer: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")

    async def scenario() -> None:
        stub = SGLangStub(facts={"tp_size": 2})
        async with stub.serving(), asyncio.timeout(30):
            sglang = {"servers": [stub.url], "transfer": transfer}
            config = small_config(
                model={"path": str(model), "build": None, "tokenizer_chars": None},
                rollout={
                    "max_tokens": 5,
                    "group_size": 4,
                    "backend": "sglang",
                    "sglang": sglang,
                },
                weights={"backend": "gloo"},
            )
            engine = SGLangEngine(config, model)
            await engine.start()
            try:
                await take_a_version(engine, stub, direct=transfer == "direct")
            finally:
                await engine.close()

    asyncio.run(scenario())


async def take_a_version(engine: SGLangEngine, stub: SGLangStub, *, direct: bool) -> None:
    assert isinstance(engine, DirectSink)
    if not direct:
        assert engine.outside is None
        return
    assert engine.outside is not None
    assert engine.outside.sizes == (2,)
    await engine.stamp(7)
    await engine.outside.join(0, MEETING, 5.0)
    await engine.pause("in_place")
    await engine.outside.begin()
    assert engine.version is None
    waits = asyncio.create_task(engine.generate([5, 6], SamplingParams(3, 1.0, 0)))
    looks = len(stub.called("/generate"))
    await engine.outside.load(0, MEETING.group, SLOTS, 5.0)
    assert len(stub.called("/generate")) == looks, "it is held"
    await engine.stamp(8)
    await engine.resume()
    assert [span.version for span in (await waits).spans] == [8]
