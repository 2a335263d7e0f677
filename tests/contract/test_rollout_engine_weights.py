"""What every rollout engine promises of weights: which of them make a token, loads and pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from tests.helpers.rollout_engines import (
    GREEDY,
    SHORT,
    Subject,
    assert_whole,
    load,
    new_weights,
    paused_halfway,
    run,
    started,
    tokens_of,
    until,
)

from ratchet.backends.rollout.base import SamplingParams
from ratchet.errors import WeightsMismatch
from ratchet.transport.weights.base import ProbedSink
from ratchet.types import PauseMode


def test_serves_nothing_before_a_version_is_stamped(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject, version=None) as engine:
            assert engine.version is None
            task = asyncio.create_task(engine.generate([5], SHORT))
            await until(lambda: engine.stats().waiting == 1)
            await engine.pause("in_place")
            await engine.resume()
            assert engine.stats().generated_tokens == 0
            assert not task.done()
            await engine.write(new_weights(engine, 3))
            await engine.stamp(3)
            assert engine.version == 3
            assert [span.version for span in (await task).spans] == [3]

    run(scenario())


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_each_token_has_the_version_that_made_it(subject: Subject, mode: PauseMode) -> None:
    async def scenario() -> None:
        async with started(subject, version=4) as engine:
            tasks = await paused_halfway(subject, engine, mode)
            await load(engine, 9, mode)
            for completion in await asyncio.gather(*tasks):
                assert_whole(completion)
                assert [span.version for span in completion.spans] == [4, 9]
            fresh = await engine.generate([5], SHORT)
            assert [span.version for span in fresh.spans] == [9]

    run(scenario())


def test_nothing_is_generated_while_paused(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            tasks = await paused_halfway(subject, engine, "in_place")
            made = engine.stats().generated_tokens
            late = asyncio.create_task(engine.generate([5], SHORT))
            await until(lambda: engine.stats().waiting >= 1)
            await engine.pause("in_place")  # a round trip through the engine
            assert engine.stats().generated_tokens == made
            assert not late.done()
            await engine.resume()
            for completion in await asyncio.gather(late, *tasks):
                assert [span.version for span in completion.spans] == [0]

    run(scenario())


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_failed_load_quarantines_until_a_good_one(subject: Subject, mode: PauseMode) -> None:
    async def scenario() -> None:
        async with started(subject, version=1) as engine:
            tasks = await paused_halfway(subject, engine, mode)
            made = engine.stats().generated_tokens
            with pytest.raises(WeightsMismatch, match="no_such_weight"):
                await engine.write({"no_such_weight": torch.zeros(1)})
            assert engine.version is None
            await engine.resume()
            await engine.pause(mode)
            await engine.resume()
            assert engine.stats().generated_tokens == made
            assert not any(task.done() for task in tasks)
            await load(engine, 2, mode)
            for completion in await asyncio.gather(*tasks):
                assert_whole(completion)
                assert [span.version for span in completion.spans] == [1, 2]

    run(scenario())


def test_a_write_quarantines_before_it_is_stamped(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject, version=1) as engine:
            await engine.write(new_weights(engine, 2))
            assert engine.version is None
            await engine.stamp(2)
            assert engine.version == 2

    run(scenario())


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_a_write_of_another_kind_is_refused(subject: Subject, change: str) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            name, value = next(iter(new_weights(engine, 1).items()))
            wrong = value[:1] if change == "shape" else value.double()
            with pytest.raises(WeightsMismatch, match=name):
                await engine.write({name: wrong})
            with pytest.raises(WeightsMismatch, match="no_such_weight"):
                await engine.read(["no_such_weight"])

    run(scenario())


def test_reads_back_what_was_written(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            written = new_weights(engine, 5)
            if not subject.reads_back:
                assert isinstance(engine, ProbedSink)
                with pytest.raises(WeightsMismatch, match="probe"):
                    await engine.read(list(written))
                return
            await engine.write(written)
            for name, value in zip(written, await engine.read(list(written)), strict=True):
                assert torch.equal(value, written[name]), name
            for spec in engine.specs():
                if spec.alias_of is not None:
                    [value] = await engine.read([spec.name])
                    assert torch.equal(value, written[spec.alias_of]), spec.name

    run(scenario())


def test_weights_decide_what_is_generated(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            seen = []
            for version in (1, 2, 1):
                await engine.write(new_weights(engine, version))
                await engine.stamp(version)
                seen.append(tokens_of(await engine.generate([5, 6], GREEDY)))
            assert seen[0] == seen[2] != seen[1]

    run(scenario())


CALLS: Sequence[Sequence[str]] = [
    ("resume", "resume"),
    ("in_place", "in_place", "resume"),
    ("in_place", "retract", "in_place", "resume", "resume"),
    ("retract", "resume", "retract", "resume"),
]


@pytest.mark.parametrize("calls", CALLS, ids="-".join)
def test_pause_and_resume_in_any_order(subject: Subject, calls: Sequence[str]) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            alone = await engine.generate([5, 6], GREEDY._replace(max_tokens=40))
            tasks = [
                asyncio.create_task(engine.generate([5, 6], GREEDY._replace(max_tokens=40)))
                for _ in range(2)
            ]
            for call in calls:
                await (engine.resume() if call == "resume" else engine.pause(call))  # type: ignore[arg-type]
            for completion in await asyncio.gather(*tasks):
                assert_whole(completion)
                assert tokens_of(completion) == tokens_of(alone)

    run(scenario())


def test_loads_and_requests_in_a_crowd(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            tasks = [
                asyncio.create_task(
                    engine.generate([5] * (1 + i % 7), SamplingParams(10 + 2 * i, 1.0, i))
                )
                for i in range(40)
            ]
            for version in range(1, 6):
                await load(engine, version, "retract" if version % 2 else "in_place")
            for i, completion in enumerate(await asyncio.gather(*tasks)):
                assert_whole(completion)
                assert len(completion.token_ids) == 10 + 2 * i
                versions = [span.version for span in completion.spans]
                assert versions == sorted(versions)
            assert engine.stats().running == engine.stats().waiting == 0

    run(scenario())
