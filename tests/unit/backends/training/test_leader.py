"""Rank 0 leads and the others follow: over a channel in memory, and for a lost rank a real one."""

import asyncio
import queue
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.gang import SecondRank
from tests.helpers.training import copy_prompts, make_groups, training_config, write_model

from ratchet.backends.training.base import GradientReport, StepReport, TrainingBackend
from ratchet.backends.training.channel import VERDICT_BYTES, Verdict
from ratchet.backends.training.commands import Command
from ratchet.backends.training.fake import FakeBackend
from ratchet.backends.training.fsdp import FsdpBackend, create_backend
from ratchet.backends.training.ranks import Leader, follow, lead
from ratchet.errors import RunFailed
from ratchet.types import RolloutGroup

WITHIN_S = 20.0


class Wire:
    """What two ranks share: the announcements, and the verdicts on their way to each."""

    def __init__(self) -> None:
        self.commands: queue.Queue[Command] = queue.Queue()
        self.verdicts: tuple[queue.Queue[Verdict], ...] = (queue.Queue(), queue.Queue())


class MemoryChannel:
    """A `Channel` of two ranks in one process."""

    def __init__(self, wire: Wire, rank: int, log: list[str]) -> None:
        self.rank = rank
        self._wire = wire
        self._log = log

    def announce(self, command: Command) -> None:
        self._log.append(f"announce {type(command).__name__}")
        self._wire.commands.put(command)

    def receive(self) -> Command:
        return self._wire.commands.get(timeout=WITHIN_S)

    def agree(self, mine: Verdict) -> list[Verdict]:
        self._wire.verdicts[1 - self.rank].put(mine)
        theirs = self._wire.verdicts[self.rank].get(timeout=WITHIN_S)
        return [theirs, mine] if self.rank else [mine, theirs]


class Logged(FakeBackend):
    """Notes begin and end of the calls whose order matters; fails where it is told to."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.failure: Exception | None = None
        self.begun = threading.Event()
        self.go = threading.Event()
        self.go.set()

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        self.log.append("forward begins")
        self.begun.set()
        await asyncio.to_thread(self.go.wait, WITHIN_S)
        if self.failure is not None:
            raise self.failure
        report = await super().forward_backward(groups)
        self.log.append("forward ends")
        return report

    async def optimizer_step(self) -> StepReport:
        self.log.append("step")
        return await super().optimizer_step()

    def read(self, names: Sequence[str]) -> Any:
        self.log.append("read")
        return super().read(names)


class Gang:
    """A leader and a follower in a thread of its own."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.log: list[str] = []
        self.followed: list[str] = []
        self.mine, self.theirs = Logged(self.log), Logged(self.followed)
        self.leader = Leader(self.mine, MemoryChannel(self.wire, 0, self.log))
        self._thread = ThreadPoolExecutor(max_workers=1)
        channel = MemoryChannel(self.wire, 1, self.followed)
        self.follower: Future[None] = self._thread.submit(follow, self.theirs, channel)

    def ended(self) -> Exception | None:
        error = self.follower.exception(timeout=WITHIN_S)
        self._thread.shutdown()
        assert error is None or isinstance(error, Exception)
        return error


def run(body: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(WITHIN_S):
            await body()

    asyncio.run(main())


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
