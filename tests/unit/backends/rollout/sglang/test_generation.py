"""The requests of an engine on a stub: what is held, sent, refused and taken back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from tests.helpers.sglang_stub import SGLangStub

from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.backends.rollout.sglang.answers import Limits
from ratchet.backends.rollout.sglang.client import SGLangClient
from ratchet.backends.rollout.sglang.generation import Generation
from ratchet.errors import GenerationFailed
from ratchet.types import PolicyVersion

SHORT = SamplingParams(max_tokens=3, temperature=1.0, seed=0)
LONG = SHORT._replace(max_tokens=4000)


class World(NamedTuple):
    """A stub, its requests, and what the weights would say."""

    stub: SGLangStub
    generation: Generation
    proved: set[PolicyVersion]
    proof: asyncio.Event
    """over; versions that are not proved then are refused"""
    lost: list[str]

    def ask(self, params: SamplingParams = SHORT) -> asyncio.Task[Completion]:
        return asyncio.create_task(self.generation.generate([5, 6], params))

    def serve(self, version: PolicyVersion, **fields: str) -> None:
        self.stub.weight_version = str(version)
        self.proved.add(version)
        self.generation.serve(version, fields)


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def world(version: PolicyVersion | None = 7, timeout_s: float = 20.0) -> AsyncIterator[World]:
    stub, proved, proof, lost = SGLangStub(), set[PolicyVersion](), asyncio.Event(), list[str]()
    proof.set()

    async def decided(version: PolicyVersion) -> bool:
        await proof.wait()
        return version in proved

    async with stub.serving():
        client = SGLangClient(stub.url)
        generation = Generation(
            client,
            [client],
            limits=Limits.of(stub.vocabulary, stub.context),
            end_ids=(),
            timeout_s=timeout_s,
            decided=decided,
            lost=lost.append,
        )
        made = World(stub, generation, proved, proof, lost)
        if version is not None:
            made.serve(version)
        try:
            yield made
        finally:
            await generation.close()
            await client.close()


async def has(world: World, running: int) -> None:
    await world.stub.until(lambda: len(world.stub.running) == running)


async def with_tokens(world: World) -> None:
    """Wait until each running request has a token."""
    while not all(request.tokens for request in world.stub.running.values()):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def test_requests_wait_for_a_version_and_for_the_end_of_a_pause() -> None:
    async def scenario() -> None:
        async with world(version=None) as w:
            w.generation.pause()
            task = w.ask()
            while w.generation.stats().waiting == 0:  # noqa: ASYNC110
                await asyncio.sleep(0)
            w.serve(7)
            await asyncio.sleep(0.01)
            assert w.stub.called("/generate") == []
            w.generation.resume()
            assert [span.version for span in (await task).spans] == [7]

    run(scenario())


def test_a_request_goes_on_across_new_weights_and_has_both_versions() -> None:
    async def scenario() -> None:
        async with world() as w:
            task = w.ask(SHORT._replace(max_tokens=200))
            await has(w, 1)
            await with_tokens(w)
            w.generation.hold()
            w.serve(9)
            completion = await task
            assert [span.version for span in completion.spans] == [7, 9]
            assert completion.spans[-1].end == 200

    run(scenario())


def test_tokens_of_a_version_wait_for_its_proof() -> None:
    async def scenario() -> None:
        async with world() as w:
            task = w.ask(SHORT._replace(max_tokens=50))
            await has(w, 1)
            w.generation.hold()
            w.proof.clear()
            w.stub.weight_version = "8"
            await has(w, 0)
            await asyncio.sleep(0.01)
            assert not task.done()
            w.serve(8)
            w.proof.set()
            assert (await task).spans[-1].version == 8

    run(scenario())


def test_tokens_of_a_version_that_is_refused_are_no_sample() -> None:
    async def scenario() -> None:
        async with world() as w:
            task = w.ask(SHORT._replace(max_tokens=50))
            await has(w, 1)
            w.generation.hold()
            w.proof.clear()
            w.stub.weight_version = "8"
            await has(w, 0)
            w.generation.refuse("version 8 was refused")
            w.proof.set()
            with pytest.raises(GenerationFailed, match="8 was refused"):
                await task

    run(scenario())


def test_a_refusal_takes_back_what_the_servers_have_and_keeps_what_waits() -> None:
    async def scenario() -> None:
        async with world() as w:
            sent = w.ask(LONG)
            await has(w, 1)
            w.generation.hold()
            waits = w.ask()
            await asyncio.sleep(0)
            w.generation.refuse("version 8 was refused")
            with pytest.raises(GenerationFailed, match="refused"):
                await sent
            await has(w, 0)
            assert not waits.done()
            w.serve(9)
            assert [span.version for span in (await waits).spans] == [9]

    run(scenario())


def test_a_refusal_lets_what_names_its_adapter_go_on() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.serve(7, lora_path="adapter-7")
            sent = w.ask(SHORT._replace(max_tokens=50))
            await has(w, 1)
            w.generation.refuse("version 8 was refused")
            assert [span.version for span in (await sent).spans] == [7]

    run(scenario())


def test_each_version_has_a_prefix_cache_of_its_own_also_when_it_comes_again() -> None:
    async def scenario() -> None:
        async with world() as w:
            for version in (7, 8, 7):
                w.serve(version)
                await w.ask()
            salts = [body["extra_key"] for body in w.stub.called("/generate")]
            assert len(set(salts)) == 3
            await w.ask()
            assert w.stub.called("/generate")[-1]["extra_key"] == salts[-1]

    run(scenario())


def test_a_request_with_an_adapter_is_all_of_its_version() -> None:
    async def scenario() -> None:
        async with world(version=None) as w:
            w.serve(7, lora_path="seven")
            task = w.ask(SHORT._replace(max_tokens=50))
            await has(w, 1)
            w.serve(8, lora_path="eight")
            assert [span.version for span in (await task).spans] == [7]
            assert w.stub.called("/generate")[0]["lora_path"] == "seven"

    run(scenario())


@pytest.mark.parametrize("name", ["default", "6", "5"])
def test_weights_that_should_not_be_there_are_told(name: str) -> None:
    """Base weights, a version that was replaced, and one that was never here."""

    async def scenario() -> None:
        async with world(version=6) as w:
            w.serve(7)
            w.stub.weight_version = name
            with pytest.raises(GenerationFailed, match=name):
                await w.ask()
            assert len(w.lost) == 1
            assert name in w.lost[0]

    run(scenario())


def test_a_cancelled_call_leaves_the_batch_and_nobody_else_does() -> None:
    async def scenario() -> None:
        async with world() as w:
            first, second = w.ask(LONG), w.ask(LONG)
            await has(w, 2)
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            await has(w, 1)
            (abort,) = w.stub.called("/abort_request")
            assert abort["rid"] == w.stub.called("/generate")[0]["rid"]
            assert not second.done()
            assert w.generation.stats().running == 1

    run(scenario())


def test_a_call_cancelled_while_it_waits_is_never_sent() -> None:
    async def scenario() -> None:
        async with world(version=None) as w:
            task = w.ask()
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            w.serve(7)
            await w.ask()
            assert len(w.stub.called("/generate")) == 1
            assert w.stub.called("/abort_request") == []

    run(scenario())


def test_a_late_answer_fails_and_is_taken_back() -> None:
    async def scenario() -> None:
        async with world(timeout_s=0.1) as w:
            with pytest.raises(GenerationFailed, match="no answer within"):
                await w.ask(LONG)
            await w.stub.until(lambda: bool(w.stub.called("/abort_request")))

    run(scenario())


@pytest.mark.parametrize("status", [401, 500, 503])
def test_a_refusal_of_the_server_is_a_failed_generation(status: int) -> None:
    async def scenario() -> None:
        async with world() as w:
            w.stub.answers["/generate"] = (status, {"error": {"message": "out of order"}})
            with pytest.raises(GenerationFailed, match="out of order"):
                await w.ask()
            assert len(w.stub.called("/generate")) == 1

    run(scenario())


def test_a_server_that_dies_in_the_middle_is_a_failed_generation() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.stub.dies["/generate"] = 1
            with pytest.raises(GenerationFailed):
                await w.ask()
            assert len(w.stub.called("/generate")) == 1  # or it might generate twice
            await w.ask()

    run(scenario())


def test_an_engine_that_is_lost_fails_everything_at_once() -> None:
    async def scenario() -> None:
        async with world() as w:
            w.stub.hung.add("/generate")
            sent = w.ask()
            await w.stub.until(lambda: bool(w.stub.called("/generate")))
            w.generation.hold()
            waits = w.ask()
            await asyncio.sleep(0)
            w.generation.fail("the server died")
            for task in (sent, waits):
                with pytest.raises(GenerationFailed, match="the server died"):
                    await task
            with pytest.raises(GenerationFailed, match="the server died"):
                await w.ask()

    run(scenario())


def test_stats_count_what_is_known() -> None:
    async def scenario() -> None:
        async with world() as w:
            assert w.generation.stats() == (0.0, 0.0, 0, 0, 0)
            task = w.ask(SHORT._replace(max_tokens=50))
            await has(w, 1)
            assert w.generation.stats().running == 1
            await task
            stats = w.generation.stats()
            assert (stats.generated_tokens, stats.running, stats.waiting) == (50, 0, 0)
            assert stats.busy_s >= 50 * w.stub.step_s
            assert w.generation.stats().busy_s == stats.busy_s
            w.generation.pause()
            await asyncio.sleep(0.002)
            w.generation.resume()
            assert w.generation.stats().paused_s >= 0.002

    run(scenario())
