"""The engine as a whole on a stub: versions, refusals, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config
from tests.helpers.sglang_stub import SGLangStub
from tests.helpers.tiny_models import write_tiny_model

from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.backends.rollout.sglang.engine import SGLangEngine
from ratchet.errors import EngineLost, GenerationFailed, TransferFailed, WeightsMismatch
from ratchet.types import Packed, WeightProbe

SHORT = SamplingParams(max_tokens=3, temperature=1.0, seed=0)
LONG = SHORT._replace(max_tokens=4000)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("engine") / "model", eos_token_id=[2, 3])


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def started(stub: SGLangStub, model: Path, **fields: Any) -> AsyncIterator[SGLangEngine]:
    async with stub.serving():
        config = small_config(
            model={"path": str(model), "build": None, "tokenizer_chars": None},
            rollout={
                "max_tokens": 5,
                "group_size": 4,
                "backend": "sglang",
                "sglang": {"servers": [stub.url], **fields},
            },
        )
        engine = SGLangEngine(config, model)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


def ask(engine: SGLangEngine, params: SamplingParams = SHORT) -> asyncio.Task[Completion]:
    return asyncio.create_task(engine.generate([5, 6], params))


def test_a_stamp_names_the_weights_at_the_server_and_lets_requests_through(model: Path) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with started(stub, model) as engine:
            assert engine.version is None
            assert engine.context == stub.context - 2
            await engine.pause("in_place")
            task = ask(engine)
            await engine.stamp(7)
            await engine.resume()
            assert [span.version for span in (await task).spans] == [7]
            assert (engine.version, stub.weight_version) == (7, "7")
            assert not stub.paused

    run(scenario())


def test_the_ends_of_the_model_are_the_ends_of_a_request(model: Path) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with started(stub, model) as engine:
            await engine.stamp(0)
            await ask(engine)
            *_, body = stub.called("/generate")
            assert body["sampling_params"]["stop_token_ids"] == [2, 3]
            assert engine.decode([5, 3]) == engine.decode([5])

    run(scenario())


def test_a_stamp_that_fails_fails_what_the_server_has_and_leaves_it_paused(model: Path) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with started(stub, model) as engine:
            await engine.stamp(7)
            sent = ask(engine, LONG)
            await stub.until(lambda: len(stub.running) == 1)
            await engine.pause("in_place")
            waits = ask(engine)
            await asyncio.sleep(0)
            stub.answers["/continue_generation"] = (500, {"message": "out of order"})
            with pytest.raises(TransferFailed, match="out of order"):
                await engine.stamp(8)
            with pytest.raises(GenerationFailed, match="version 8 was refused"):
                await sent
            await engine.resume()
            assert engine.version is None
            assert stub.paused
            del stub.answers["/continue_generation"]
            await engine.stamp(9)
            assert [span.version for span in (await waits).spans] == [9]

    run(scenario())


def test_a_server_with_other_weights_ends_the_engine(model: Path) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with started(stub, model) as engine:
            watch = asyncio.create_task(engine.watch())
            await engine.stamp(7)
            long = ask(engine, LONG)
            await stub.until(lambda: len(stub.running) == 1)
            stub.weight_version = "default"
            for task in (ask(engine), long):
                with pytest.raises(GenerationFailed, match="'default'"):
                    await task
            assert engine.version is None
            with pytest.raises(EngineLost, match="'default'"):
                await watch
            with pytest.raises(GenerationFailed, match="'default'"):
                await ask(engine)

    run(scenario())


def test_a_server_that_is_gone_is_found_by_the_watch(model: Path) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with started(stub, model, health_s=0.1) as engine:
            await engine.stamp(7)
            stub.hung |= {"/health", "/generate"}
            task = ask(engine)
            with pytest.raises(EngineLost, match="hangs"):
                await engine.watch()
            with pytest.raises(GenerationFailed, match="hangs"):
                await task
            assert engine.version is None

    run(scenario())


def test_a_server_that_does_not_go_on_ends_the_engine(model: Path) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with started(stub, model) as engine:
            await engine.stamp(7)
            await engine.pause("retract")
            waits = ask(engine)
            await asyncio.sleep(0)
            stub.answers["/continue_generation"] = (500, {"message": "out of order"})
            with pytest.raises(TransferFailed, match="out of order"):
                await engine.resume()
            assert engine.version is None
            with pytest.raises(EngineLost, match="out of order"):
                await engine.watch()
            with pytest.raises(GenerationFailed, match="out of order"):
                await waits

    run(scenario())


def test_a_server_that_cannot_be_paused_ends_an_engine_without_a_version(model: Path) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with started(stub, model, control_timeout_s=0.5) as engine:
            watch = asyncio.create_task(engine.watch())
            await engine.stamp(7)
            stub.answers["/pause_generation"] = (500, {"message": "out of order"})
            with pytest.raises(TransferFailed, match="out of order"):
                await engine.pause("retract")
            await engine.resume()
            assert engine.version == 7  # it goes on with what it has
            del stub.answers["/pause_generation"]
            stub.answers["/continue_generation"] = (500, {"message": "out of order"})
            with pytest.raises(TransferFailed, match="out of order"):
                await engine.stamp(8)
            assert engine.version is None
            stub.answers.clear()
            stub.hung.add("/pause_generation")
            with pytest.raises(TransferFailed, match="no answer"):
                await engine.pause("retract")
            with pytest.raises(EngineLost, match="no answer"):
                await watch

    run(scenario())


@pytest.mark.parametrize("fault", ["slow", "refuses"])
def test_a_server_that_cannot_be_stopped_when_its_weights_are_refused_ends_the_engine(
    model: Path, fault: str
) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with started(stub, model, control_timeout_s=0.5) as engine:
            watch = asyncio.create_task(engine.watch())
            await engine.stamp(7)
            await engine.pause("retract")
            ids = Packed.of([5, 6, 7], "int32")
            engine.expect(WeightProbe(3, ids, Packed.of([-9.0, -9.0], "float32")))
            if fault == "slow":
                stub.hung.add("/pause_generation")
            else:
                stub.answers["/pause_generation"] = (500, {"message": "no answer today"})
            with pytest.raises(WeightsMismatch):
                await engine.stamp(8)
            with pytest.raises(EngineLost, match="no answer"):
                await watch
            assert engine.version is None

    run(scenario())


def test_an_engine_that_is_lost_while_a_version_is_proved_does_not_get_it(model: Path) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with started(stub, model) as engine:
            await engine.stamp(7)
            long = ask(engine, LONG)
            await stub.until(lambda: len(stub.running) == 1)
            await engine.pause("retract")
            ids = Packed.of([5, 6, 7], "int32")
            engine.expect(WeightProbe(3, ids, Packed.of([-1.0, -1.0], "float32")))
            stub.hung.add("/generate")
            stamping = asyncio.create_task(engine.stamp(8))
            await stub.until_called("/generate", 3)  # at the start, the request, the probe
            stub.weight_version = "default"
            with pytest.raises(GenerationFailed, match="'default'"):
                await long
            stub.hung.clear()
            await stub.notify()
            with pytest.raises(TransferFailed, match="lost while version 8"):
                await stamping
            assert engine.version is None
            assert stub.paused

    run(scenario())


def test_a_closed_engine_aborts_what_is_its_own_and_answers_no_more(model: Path) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with started(stub, model) as engine:
            await engine.stamp(7)
            task = ask(engine, LONG)
            await stub.until(lambda: len(stub.running) == 1)
            await engine.close()
            with pytest.raises(GenerationFailed, match="closed"):
                await task
            await stub.until(lambda: not stub.running)
            assert [body["abort_all"] for body in stub.called("/abort_request")] == [False] * len(
                stub.called("/abort_request")
            )
            with pytest.raises(GenerationFailed, match="closed"):
                await ask(engine)

    run(scenario())


def test_an_engine_that_was_not_started_says_so(model: Path) -> None:
    async def scenario() -> None:
        engine = SGLangEngine(small_config(), model)
        assert engine.version is None
        assert engine.stats() == (0.0, 0.0, 0, 0, 0)
        with pytest.raises(GenerationFailed, match="not started"):
            engine.encode("1")
        await engine.close()
        with pytest.raises(GenerationFailed, match="closed"):
            engine.encode("1")

    run(scenario())
