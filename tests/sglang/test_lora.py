"""LoRA adapters in a real server: each version by its own name, proved by every token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.helpers.sglang_server import ARGS, RealServer, attached_config
from tests.helpers.version_models import CLOSE, differences

from ratchet.backends.lora import adapter_weights, add_adapter
from ratchet.backends.models import load_model
from ratchet.backends.rollout.base import Completion, SamplingParams
from ratchet.backends.rollout.sglang import adapter
from ratchet.backends.rollout.sglang.client import CallRefused, SGLangClient
from ratchet.backends.rollout.sglang.engine import SGLangEngine
from ratchet.backends.training.probe import compute_probe
from ratchet.config import LoraConfig
from ratchet.errors import TransferFailed, WeightsMismatch

LORA = LoraConfig(rank=4)
PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def lora_server(
    endless_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    log = tmp_path_factory.mktemp("server") / "lora.log"
    args = (*ARGS, "--lora-backend", "torch_native")
    server = RealServer(endless_model, log, lora=LORA, args=args)
    yield server
    server.close()


class Trainer:
    """A model with an adapter; that of version n is drawn from seed n."""

    def __init__(self, directory: Path) -> None:
        self.model = load_model(directory, "float32")
        digest = add_adapter(self.model, LORA, seed=0)
        self.weights = {
            name: weight.detach() for name, weight in adapter_weights(self.model, digest).items()
        }

    def draw(self, version: int) -> None:
        generator = torch.Generator().manual_seed(version)
        for weight in self.weights.values():
            if weight.numel():
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)

    async def load(self, engine: SGLangEngine, version: int, *, spoil: bool = False) -> None:
        """Do as `finalize` does."""
        self.draw(version)
        engine.expect(compute_probe(self.model, torch.device("cpu"), version))
        sent = {name: weight.clone() for name, weight in self.weights.items()}
        if spoil:
            next(w for name, w in sent.items() if "layers.1.mlp.down_proj.lora_B" in name)[5] = 0
        try:
            await engine.pause("in_place")
            await engine.write(sent)
            await engine.stamp(version)
        finally:
            await engine.resume()

    def error(self, completion: Completion, version: int) -> float:
        self.draw(version)
        return float(differences(self.model, completion, PROMPT).max())


def run(
    server: RealServer,
    model: Path,
    folder: Path,
    body: Callable[[SGLangEngine, Trainer], Awaitable[None]],
) -> None:
    async def main() -> None:
        config = attached_config(server, model, adapter_dir=str(folder))
        lora = config.model.model_copy(update={"lora": LORA})
        engine = SGLangEngine(config.model_copy(update={"model": lora}), model)
        async with asyncio.timeout(200):
            await engine.start()
            try:
                await body(engine, Trainer(model))
            finally:
                await engine.close()

    asyncio.run(main())
    assert list(folder.iterdir()) == []


def test_what_runs_keeps_its_adapter_and_what_comes_gets_the_new_one(
    lora_server: RealServer, endless_model: Path, tmp_path: Path
) -> None:
    async def body(engine: SGLangEngine, trainer: Trainer) -> None:
        calls = []
        for version in range(4):
            await trainer.load(engine, version)
            assert engine.version == version
            params = SamplingParams(max_tokens=200, temperature=1.0, seed=version)
            calls.append(asyncio.create_task(engine.generate(PROMPT, params)))
            await asyncio.sleep(0.1)
        for version, completion in enumerate(await asyncio.gather(*calls)):
            assert [(s.version, s.start, s.end) for s in completion.spans] == [(version, 0, 200)]
            assert trainer.error(completion, version) < CLOSE
        assert trainer.error(completion, 0) > 0.1  # the check itself can tell adapters apart

    run(lora_server, endless_model, tmp_path, body)


def test_a_spoilt_adapter_and_a_full_disk_are_refused_and_the_next_one_is_taken(
    lora_server: RealServer, endless_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    async def body(engine: SGLangEngine, trainer: Trainer) -> None:
        await trainer.load(engine, 0)
        with pytest.raises(WeightsMismatch, match="largest difference of a log probability"):
            await trainer.load(engine, 1, spoil=True)
        assert engine.version is None
        with monkeypatch.context() as patch:
            patch.setattr(adapter, "save_file", full)
            with pytest.raises(TransferFailed, match="No space left"):
                await trainer.load(engine, 1)
        await trainer.load(engine, 1)
        params = SamplingParams(max_tokens=50, temperature=1.0, seed=0)
        completion = await engine.generate(PROMPT, params)
        assert [span.version for span in completion.spans] == [1]
        assert trainer.error(completion, 1) < CLOSE

    run(lora_server, endless_model, tmp_path, body)
    client = SGLangClient(lora_server.url)

    async def unknown() -> None:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "lora_path": "gone"}
        try:
            with pytest.raises(CallRefused):
                await client.generate(body, timeout_s=30)
        finally:
            await client.close()

    asyncio.run(unknown())
