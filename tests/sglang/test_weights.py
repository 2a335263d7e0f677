"""Weights through the worker into a real server, while it generates: proved by every token.

Each version is a model drawn from its own seed, so that its name can be checked against the log
probabilities of the tokens that carry it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.helpers.sglang_server import ARGS, RealServer, attached_config
from tests.helpers.version_models import CLOSE, error_of, model_of, tensors_of

from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.backends.rollout.sglang.client import CallRefused, SGLangClient
from ratchet.backends.rollout.sglang.engine import SGLangEngine
from ratchet.backends.rollout.sglang.group import ServerGroup
from ratchet.backends.rollout.sglang.session import UpdateSession
from ratchet.backends.training.probe import compute_probe
from ratchet.errors import GenerationFailed, TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import TensorSpec
from ratchet.types import PauseMode, VersionSpan

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UPDATES = 20


async def load(
    engine: SGLangEngine,
    version: int,
    model: PreTrainedModel,
    mode: PauseMode = "retract",
    *,
    spoil: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
) -> None:
    """Do as `finalize` does, with two buckets."""
    tensors = tensors_of(model)
    engine.expect(compute_probe(model, torch.device("cpu"), version))
    spoil(tensors)
    names = list(tensors)
    try:
        await engine.pause(mode)
        for part in (names[:7], names[7:]):
            await engine.write({name: tensors[name] for name in part})
        await engine.stamp(version)
    finally:
        await engine.resume()


@asynccontextmanager
async def attached(server: RealServer, model: Path, **fields: Any) -> AsyncIterator[SGLangEngine]:
    engine = SGLangEngine(attached_config(server, model, **fields), model)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def run(body: Callable[[], Awaitable[None]], timeout_s: float = 200.0) -> None:
    async def main() -> None:
        async with asyncio.timeout(timeout_s):
            await body()

    asyncio.run(main())


async def is_paused(server: RealServer) -> bool:
    """Ask what knows: /health says 200 of a paused server that has just answered an abort."""
    client = SGLangClient(server.url)
    try:
        await client.call("GET", "/ready")
    except CallRefused:
        return True
    finally:
        await client.close()
    return False


async def until(condition: Callable[[], object]) -> None:
    """Look again and again; the test's timeout is the limit."""
    while not condition():  # noqa: ASYNC110 - the engine tells nobody
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_updates_under_load_abort_nothing_and_every_token_says_its_version(
    real_server: RealServer, endless_model: Path, mode: PauseMode
) -> None:
    models = {version: model_of(version, mode) for version in range(UPDATES + 1)}
    done: list[tuple[list[int], Completion]] = []

    async def generate(engine: SGLangEngine, number: int) -> None:
        while engine.version != UPDATES:
            prompt = [3 + (number + shift) % 20 for shift in range(5)]
            params = SamplingParams(max_tokens=80, temperature=1.0, seed=len(done))
            done.append((prompt, await engine.generate(prompt, params)))

    async def body() -> None:
        async with attached(real_server, endless_model) as engine:
            await load(engine, 0, models[0], mode)
            requests = [asyncio.create_task(generate(engine, number)) for number in range(6)]
            for version in range(1, UPDATES + 1):
                finished = len(done)
                await until(lambda before=finished: len(done) >= before + 2)  # tokens between
                await load(engine, version, models[version], mode)
                assert engine.version == version
            await asyncio.gather(*requests)

    run(body)
    assert all(completion.finish_reason == "length" for _, completion in done)
    assert all(len(completion.token_ids) == 80 for _, completion in done)
    assert sum(len(completion.spans) > 1 for _, completion in done) >= UPDATES
    seen = {span.version for _, completion in done for span in completion.spans}
    assert seen == set(models)
    assert max(error_of(completion, prompt, models) for prompt, completion in done) < CLOSE
    prompt, mixed = next(each for each in done if len(each[1].spans) > 1)
    late = VersionSpan(mixed.spans[-1].version, 0, len(mixed.token_ids))
    assert error_of(mixed._replace(spans=(late,)), prompt, models) > 0.1  # it can tell them apart


def zero_a_row(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.mlp.down_proj.weight"] = (
        tensors["model.layers.1.mlp.down_proj.weight"].clone().index_fill(0, torch.tensor(5), 0.0)
    )


def one_from_before(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors_of(model_of(0))[name]


@pytest.mark.parametrize("spoil", [zero_a_row, one_from_before])
def test_what_differs_from_the_trainers_is_refused_and_nothing_of_it_comes_out(
    real_server: RealServer, endless_model: Path, spoil: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    async def body() -> None:
        async with attached(real_server, endless_model) as engine:
            params = SamplingParams(max_tokens=400, temperature=1.0, seed=0)
            await load(engine, 0, model_of(0))
            running = asyncio.create_task(engine.generate([5, 6, 7], params))
            await until(lambda: engine.stats().running)
            with pytest.raises(WeightsMismatch, match="largest difference of a log probability"):
                await load(engine, 1, model_of(1), spoil=spoil)
            assert engine.version is None
            with pytest.raises(GenerationFailed, match="version 1"):
                await running
            held = asyncio.create_task(engine.generate([5, 6, 7], params))
            assert await is_paused(real_server)
            await load(engine, 2, model_of(2))
            completion = await held
            assert [span.version for span in completion.spans] == [2]
            assert error_of(completion, [5, 6, 7], {2: model_of(2)}) < CLOSE

    run(body)


def test_an_unknown_parameter_is_ours_to_refuse_as_the_server_says_nothing(
    real_server: RealServer, endless_model: Path
) -> None:
    async def body() -> None:
        async with attached(real_server, endless_model) as engine:
            await load(engine, 0, model_of(0))
            with pytest.raises(WeightsMismatch, match="bogus"):
                await load(engine, 1, model_of(1), spoil=lambda t: t.update(bogus=torch.ones(4)))
            await load(engine, 2, model_of(2))
        client = SGLangClient(real_server.url)
        group, session = ServerGroup([client], [1], "127.0.0.1"), UpdateSession([client])
        await group.form(30)
        await session.pause("retract")
        await session.begin()
        bogus = [TensorSpec("bogus", "float32", (4,))]
        sent = group.send([torch.ones(4)], 30)
        await session.update(bogus, group.name, timeout_s=30)  # does not raise
        await sent
        await session.end()
        await group.close()
        await client.close()

    run(body)


def test_an_engine_takes_over_from_one_that_ended_in_the_middle_of_a_load(
    real_server: RealServer, endless_model: Path
) -> None:
    async def body() -> None:
        async with attached(real_server, endless_model) as engine:
            await load(engine, 3, model_of(3))
            await engine.pause("retract")
            await engine.write(
                {name: tensors_of(model_of(4))[name] for name in ["model.norm.weight"]}
            )
        async with attached(real_server, endless_model) as engine:
            assert engine.version is None  # whatever the server calls its weights
            held = asyncio.create_task(
                engine.generate([5, 6], SamplingParams(max_tokens=20, temperature=1.0, seed=0))
            )
            await load(engine, 9, model_of(9))
            assert error_of(await held, [5, 6], {9: model_of(9)}) < CLOSE

    run(body)


def test_a_group_that_this_end_leaves_unblocks_the_server(real_server: RealServer) -> None:
    async def body() -> None:
        client = SGLangClient(real_server.url)
        group, session = ServerGroup([client], [1], "127.0.0.1"), UpdateSession([client])
        await group.form(30)
        await session.pause("retract")
        await session.begin()
        spec = TensorSpec("model.norm.weight", "float32", (32,))
        waiting = asyncio.create_task(session.update([spec], group.name, timeout_s=60))
        await asyncio.sleep(0.5)  # it waits for a broadcast that never comes
        assert not waiting.done()
        await group.close()
        with pytest.raises(TransferFailed, match="Failed to receive weights"):
            await waiting
        await client.close()

    run(body)


@pytest.fixture
def two_ranks(
    endless_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[RealServer]:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    log = tmp_path / "two-ranks.log"
    server = RealServer(endless_model, log, tp=2, args=(*ARGS, "--disable-overlap-schedule"))
    yield server
    server.close()


def test_two_ranks_hold_what_was_sent_and_a_killed_server_loses_the_engine(
    two_ranks: RealServer, endless_model: Path
) -> None:
    async def body() -> None:
        async with attached(two_ranks, endless_model) as engine:
            params = SamplingParams(max_tokens=30, temperature=1.0, seed=0)
            models = {version: model_of(version, "in_place") for version in range(6)}
            across = params._replace(max_tokens=300)
            await load(engine, 0, models[0])
            for version in range(1, 6):  # paused in place, as nothing overlaps here
                running = asyncio.create_task(engine.generate([5, 6, 7], across))
                await until(lambda: engine.stats().running)
                await asyncio.sleep(0.2)
                await load(engine, version, models[version], "in_place")
                assert error_of(await running, [5, 6, 7], models) < CLOSE
            completion = await engine.generate([5, 6, 7], params)
            assert [span.version for span in completion.spans] == [5]
            running = asyncio.create_task(
                engine.generate([5, 6, 7], params._replace(max_tokens=1000))
            )
            await until(lambda: engine.stats().running)
            await engine.pause("retract")
            tensors = tensors_of(model_of(3))
            await engine.write({"model.norm.weight": tensors.pop("model.norm.weight")})
            for process in two_ranks.processes():
                process.kill()
            with pytest.raises(TransferFailed):
                await engine.write(tensors)
            assert engine.version is None
            with pytest.raises(GenerationFailed):
                await running

    run(body)
