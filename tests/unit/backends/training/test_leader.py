"""Rank 0 leads and the others follow: over a channel in memory, and for a lost rank a real one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.gang import SecondRank
from tests.helpers.memory_gang import WITHIN_S, Gang, run
from tests.helpers.training import copy_prompts, make_groups, training_config, write_model

from ratchet.backends.training.base import TrainingBackend
from ratchet.backends.training.channel import VERDICT_BYTES, Verdict
from ratchet.backends.training.fake import FakeBackend
from ratchet.backends.training.fsdp import FsdpBackend, create_backend
from ratchet.backends.training.ranks import Leader, lead
from ratchet.errors import RunFailed


def test_both_ranks_end_up_with_the_same_weights() -> None:
    gang = Gang()

    async def body() -> None:
        leader = gang.leader
        await leader.start()
        await leader.forward_backward(make_groups())
        assert (await leader.optimizer_step()).applied
        await leader.forward_backward(make_groups(seed=1))
        await leader.skip_step()
        assert [spec.name for spec in leader.specs()] == ["w"]
        assert (gang.mine.weights == gang.theirs.weights).all()
        assert gang.mine.weights[0] == 1.0
        await leader.close()

    run(body)
    assert gang.ended() is None


def test_a_read_from_another_thread_waits_for_the_call_in_hand_on_every_rank() -> None:
    gang = Gang()

    async def body() -> None:
        leader = gang.leader
        await leader.start()
        gang.log.clear()
        gang.mine.go.clear()
        forward = asyncio.create_task(leader.forward_backward(make_groups()))
        await asyncio.to_thread(gang.mine.begun.wait, WITHIN_S)
        reading = asyncio.create_task(asyncio.to_thread(leader.read, ["w"]))
        step = asyncio.create_task(_after(reading, leader))
        await asyncio.sleep(0.05)  # time for a read that does not wait
        assert gang.log == ["announce ForwardBackward", "forward begins"]
        gang.mine.go.set()
        await forward
        await reading
        await step
        await leader.close()

    run(body)
    assert gang.ended() is None
    assert gang.log == [
        "announce ForwardBackward",
        "forward begins",
        "forward ends",
        "announce Read",
        "read",
        "announce OptimizerStep",
        "step",
        "announce Close",
    ]
    assert gang.followed == ["forward begins", "forward ends", "read", "step"]


async def _after(reading: "asyncio.Task[Any]", leader: Leader) -> None:
    await asyncio.wait([reading])
    await leader.optimizer_step()


def test_many_callers_are_heard_in_one_order_on_both_ranks() -> None:
    gang = Gang()

    async def body() -> None:
        leader = gang.leader
        await leader.start()
        gang.log.clear()

        async def steps() -> None:
            for _ in range(20):
                await leader.forward_backward(make_groups(1, 2))
                await leader.optimizer_step()

        def reads() -> None:
            for _ in range(40):
                leader.read(["w"])

        await asyncio.gather(steps(), asyncio.to_thread(reads), asyncio.to_thread(reads))
        await leader.close()

    run(body)
    assert gang.ended() is None
    done = [entry for entry in gang.log if not entry.startswith("announce")]
    assert done == gang.followed
    assert done.count("read") == 80
    assert done.count("step") == 20


def test_a_read_on_the_loop_of_the_caller_does_not_wait_for_that_loop() -> None:
    gang = Gang()

    async def body() -> None:
        await gang.leader.start()
        forward = asyncio.create_task(gang.leader.forward_backward(make_groups()))
        await asyncio.sleep(0)  # it is in the queue
        assert len(gang.leader.read(["w"])) == 1  # blocks this loop
        await forward
        await gang.leader.close()

    run(body)
    assert gang.ended() is None


def test_what_fails_alike_everywhere_is_an_error_and_not_the_end() -> None:
    gang = Gang()

    async def body() -> None:
        leader = gang.leader
        with pytest.raises(RuntimeError, match="not started"):
            await leader.forward_backward(make_groups())
        await leader.start()
        with pytest.raises(RuntimeError, match="no gradients"):
            await leader.optimizer_step()
        await leader.forward_backward(make_groups())
        await leader.optimizer_step()
        await leader.close()
        with pytest.raises(RuntimeError, match="closed"):
            await leader.optimizer_step()
        with pytest.raises(RuntimeError, match="closed"):
            leader.read(["w"])
        await leader.close()

    run(body)
    assert gang.ended() is None


@pytest.mark.parametrize("rank", [0, 1])
def test_what_fails_on_one_rank_ends_them_all_and_is_named(rank: int) -> None:
    gang = Gang()
    (gang.mine, gang.theirs)[rank].failure = MemoryError("8 GiB more")

    async def body() -> None:
        leader = gang.leader
        await leader.start()
        first = f"ForwardBackward did not end alike on all ranks: rank {rank}: MemoryError: 8 GiB"
        with pytest.raises(RunFailed, match=first) as caught:
            await leader.forward_backward(make_groups())
        assert (caught.value.__cause__ is not None) == (rank == 0)
        for call in (leader.optimizer_step, leader.skip_step):
            with pytest.raises(RunFailed, match=first):
                await call()
        announced = list(gang.log)
        await leader.close()
        assert gang.log == announced
        with pytest.raises(RuntimeError, match="closed"):
            gang.mine.specs()

    run(body)
    error = gang.ended()
    assert isinstance(error, RunFailed)
    assert f"rank {rank}: MemoryError" in str(error)
    with pytest.raises(RuntimeError, match="closed"):
        gang.theirs.specs()


def test_a_verdict_is_cut_to_what_travels() -> None:
    verdict = Verdict.of(ValueError("é" * VERDICT_BYTES))
    assert verdict.text.startswith("ValueError: éé")
    assert VERDICT_BYTES - 2 < len(verdict.text.encode()) <= VERDICT_BYTES
    assert Verdict.of(None).text == ""
    assert Verdict.of(ValueError()).text != ""


def test_a_process_without_ranks_leads_nobody(tmp_path: Path) -> None:
    backend = FakeBackend()
    assert lead(backend) is backend
    assert isinstance(create_backend(training_config(), tmp_path), FsdpBackend)


# --- real ranks


@pytest.fixture(scope="module")
def second_rank() -> Iterator[SecondRank]:
    second = SecondRank()
    yield second
    second.stop()


def train(backend: TrainingBackend) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train a fixed job; return everything that was reported, and the weights."""
    reports: list[dict[str, float]] = []

    async def body() -> None:
        await backend.start()
        reports.append(dict(await backend.warm_start(copy_prompts(9))))
        for seed in range(3):
            report = await backend.forward_backward(make_groups(3, 3, seed=seed))
            step = await backend.optimizer_step()
            reports.append({**report.metrics, **step.metrics})
        names = [spec.name for spec in backend.specs()]
        weights.update(zip(names, map(torch.clone, backend.read(names)), strict=True))
        await backend.close()

    weights: dict[str, torch.Tensor] = {}
    asyncio.run(body())
    return reports, weights


@pytest.mark.slow
def test_two_led_ranks_report_what_one_process_does(
    tmp_path: Path, second_rank: SecondRank
) -> None:
    config = training_config(
        warm_start={"steps": 2, "batch_size": 7}, trainer={"micro_batch_tokens": 30}
    )
    base = write_model(config, tmp_path / "base")
    alone, weights = train(create_backend(config, base))
    with second_rank.meet(config.model_dump(mode="json"), base):
        led, led_weights = train(create_backend(config, base))
    assert second_rank.ended() == "closed"
    assert len(led) == len(alone) == 4
    for mine, theirs in zip(led, alone, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    assert len({report["loss"] for report in led}) == 4
    assert led_weights.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(led_weights[name], value, rtol=0.0, atol=1e-5)


@pytest.mark.slow
def test_a_rank_that_cannot_load_ends_the_call_that_waits_for_it(
    tmp_path: Path, second_rank: SecondRank
) -> None:
    config = training_config()
    write_model(config, tmp_path / "base")
    with second_rank.meet(config.model_dump(mode="json"), tmp_path / "missing"):
        leader = create_backend(config, tmp_path / "base")

        async def body() -> None:
            with pytest.raises(RunFailed, match=r"Start failed on rank 0 alone: .*[Cc]losed"):
                await leader.start()
            await leader.close()

        asyncio.run(body())
    ended = second_rank.ended()
    assert ended.startswith("RunFailed: Start failed on rank 1 alone: ConfigError: ")
    assert "missing" in ended
