"""LoRA over every weight transport: a trainer with a PEFT adapter, torch engines, and what arrives.

The transports know nothing of adapters; here is shown that they need not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.helpers.training import make_groups, training_config, write_model

from ratchet.backends.rollout.base import SamplingParams
from ratchet.backends.rollout.torch import TorchEngine, create_engine
from ratchet.backends.training.fsdp import FsdpBackend
from ratchet.config import Config, WeightsConfig
from ratchet.errors import WeightsMismatch
from ratchet.transport.weights.base import LoadReport, SendReport, WeightReceiver
from ratchet.transport.weights.plan import ALIGNMENT
from ratchet.transport.weights.registry import TRANSPORTS, open_receiver, open_sender
from ratchet.types import PolicyVersion, Rollout, RolloutGroup

LORA = {"rank": 4, "alpha": 8}
NUM_TOKENS = 12

pytestmark = pytest.mark.parametrize("transport", sorted(TRANSPORTS.keys() - {"direct"}))
one_and_three = pytest.mark.parametrize("num_engines", [1, 3])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(training_config(), tmp_path_factory.mktemp("lora") / "model")


def lora_config(**lora: Any) -> Config:
    return training_config(
        model=training_config().model.model_dump(exclude_none=True) | {"lora": LORA | lora},
        trainer={"lr": 0.05},  # so that one step moves every logit far beyond rounding
    )


class Fleet:
    """A trainer, its sender, and engines, in one process."""

    def __init__(self, transport: str, base: Path, config: Config) -> None:
        self.weights = WeightsConfig(transport=transport, timeout_s=20.0)
        self.trainer = FsdpBackend(base, config=config, device="cpu")
        self.engines: dict[str, TorchEngine] = {}
        self.receivers: dict[str, WeightReceiver] = {}

    async def open(self, num_engines: int, base: Path, config: Config) -> None:
        await self.trainer.start()
        self.sender = open_sender(self.weights, "127.0.0.1", self.trainer)
        for _ in range(num_engines):
            await self.add(base, config)

    async def add(self, base: Path, config: Config) -> TorchEngine:
        name = f"rollout-{len(self.engines)}/a"
        engine = self.engines[name] = create_engine(config, base)
        self.receivers[name] = open_receiver(self.weights)
        await engine.start()
        return engine

    async def close(self) -> None:
        for receiver in self.receivers.values():
            await receiver.close()
        await self.sender.close()
        for engine in self.engines.values():
            await engine.close()
        await self.trainer.close()

    async def sync(
        self, version: PolicyVersion
    ) -> tuple[SendReport | BaseException, list[LoadReport | BaseException]]:
        manifest, routes = self.sender.plan(1, version, version, list(self.engines))
        loads = [
            self.receivers[name].receive(manifest, routes[name], engine, "in_place")
            for name, engine in self.engines.items()
        ]
        sent, *loaded = await asyncio.gather(
            self.sender.send(manifest), *loads, return_exceptions=True
        )
        return sent, loaded

    async def sync_well(self, version: PolicyVersion) -> SendReport:
        sent, loaded = await self.sync(version)
        assert isinstance(sent, SendReport), sent
        for engine, report in zip(self.engines.values(), loaded, strict=True):
            assert isinstance(report, LoadReport), report
            assert report.digest == sent.digest
            assert engine.version == version
            await self.check_equal(engine)
        return sent

    async def check_equal(self, engine: TorchEngine) -> None:
        names = [spec.name for spec in self.trainer.specs()]
        assert names == [spec.name for spec in engine.specs()]
        theirs = await engine.read(names)
        for name, mine, held in zip(names, self.trainer.read(names), theirs, strict=True):
            assert torch.equal(mine, held), name

    async def train(self) -> None:
        await self.trainer.forward_backward(make_groups())
        assert (await self.trainer.optimizer_step()).applied


@asynccontextmanager
async def open_fleet(
    transport: str, base: Path, num_engines: int = 1, config: Config | None = None
) -> AsyncIterator[Fleet]:
    config = config or lora_config()
    fleet = Fleet(transport, base, config)
    await fleet.open(num_engines, base, config)
    try:
        yield fleet
    finally:
        await fleet.close()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


async def sample(engine: TorchEngine, prompt: list[int], seed: int, temperature: float) -> Rollout:
    """Return what the engine generates, as a rollout to train on."""
    done = await engine.generate(prompt, SamplingParams(NUM_TOKENS, temperature, seed))
    rollout = make_groups(1, 1)[0].rollouts[0]
    return msgspec.structs.replace(
        rollout,
        prompt_ids=rollout.prompt_ids.of(prompt, "int32"),
        completion_ids=done.token_ids,
        behavior_logprobs=done.logprobs,
        loss_mask=rollout.loss_mask.of([1] * len(done.token_ids), "uint8"),
        spans=done.spans,
        reward=float(seed % 2),
    )


async def check_same_policy(fleet: Fleet, engine: TorchEngine) -> list[list[int]]:
    """What the engine samples has at the trainer the probability that the engine says; return the
    tokens.
    """
    rollouts = await asyncio.gather(*[sample(engine, [3, 4, 13], seed, 1.0) for seed in range(8)])
    group = RolloutGroup(0, 0, "p", 0, tuple(rollouts))
    metrics = (await fleet.trainer.forward_backward([group])).metrics
    await fleet.trainer.skip_step()
    assert metrics["importance_ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["importance_ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["behavior_kl"] == pytest.approx(0.0, abs=1e-6)
    return [rollout.completion_ids.numpy().tolist() for rollout in rollouts]


@one_and_three
def test_every_engine_holds_the_adapter_and_generates_as_the_trainer_scores(
    transport: str, base: Path, num_engines: int
) -> None:
    async def main() -> None:
        async with open_fleet(transport, base, num_engines) as fleet:
            first = await fleet.sync_well(0)
            before = [await check_same_policy(fleet, e) for e in fleet.engines.values()]
            await fleet.train()
            second = await fleet.sync_well(1)
            after = [await check_same_policy(fleet, e) for e in fleet.engines.values()]
            assert first.digest != second.digest
            assert before[0] != after[0]
            assert all(tokens == before[0] for tokens in before)
            assert all(tokens == after[0] for tokens in after)

    run(main)


def test_the_first_version_is_the_base_model(transport: str, base: Path) -> None:
    async def tokens_and_logprobs(engine: TorchEngine) -> tuple[bytes, bytes]:
        done = await sample(engine, [3, 4, 13], 1, 1.0)
        return done.completion_ids.data, done.behavior_logprobs.data

    async def main() -> None:
        async with open_fleet(transport, base) as fleet:
            await fleet.sync_well(0)
            (engine,) = fleet.engines.values()
            plain = create_engine(training_config(), base)
            await plain.start()
            await plain.stamp(0)
            expected = await tokens_and_logprobs(plain)
            await plain.close()
            assert await tokens_and_logprobs(engine) == expected

    run(main)


def test_only_the_adapter_travels(transport: str, base: Path) -> None:
    async def main() -> None:
        async with open_fleet(transport, base) as fleet:
            sent = await fleet.sync_well(0)
            names = [spec.name for spec in fleet.trainer.specs()]
            values = fleet.trainer.read(names)
            assert all(
                ".lora_" in name for name, value in zip(names, values, strict=True) if len(value)
            )
            sizes = [value.numel() * value.element_size() for value in values]
            assert 0 <= sent.num_bytes - sum(sizes) < ALIGNMENT * len(sizes)
            model = fleet.trainer._started._model
            frozen = [p for p in model.parameters() if not p.requires_grad]
            assert sent.num_bytes < sum(p.numel() for p in frozen)  # a quarter of their bytes

    run(main)


def test_an_engine_with_another_base_is_refused_untouched(
    transport: str, base: Path, tmp_path: Path
) -> None:
    other = write_model(training_config().model_copy(update={"seed": 7}), tmp_path / "other")

    async def main() -> None:
        async with open_fleet(transport, base, 0) as fleet:
            engine = await fleet.add(other, lora_config())
            mine, theirs = fleet.trainer.specs()[0].name, engine.specs()[0].name
            assert mine != theirs
            await fleet.train()
            _, (refused,) = await fleet.sync(1)
            assert isinstance(refused, WeightsMismatch), refused
            assert f"unknown to the engine (1): {mine}" in str(refused)
            assert f"missing from the transfer (1): {theirs}" in str(refused)
            assert engine.version is None
            (last,) = await engine.read([engine.specs()[-1].name])
            assert not last.any()  # B as it was made

    run(main)


def test_an_adapter_of_another_rank_is_refused(transport: str, base: Path) -> None:
    async def main() -> None:
        async with open_fleet(transport, base, 0) as fleet:
            await fleet.add(base, lora_config(rank=2))
            _, (refused,) = await fleet.sync(0)
            assert isinstance(refused, WeightsMismatch), refused
            assert "lora_A.weight is float32[4, 32] at the trainer, float32[2, 32]" in str(refused)

    run(main)
