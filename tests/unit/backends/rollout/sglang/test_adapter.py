"""Adapters by way of the disk: what is written, what is forgotten, and a disk without room."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.helpers.sglang_stub import SGLangStub

from ratchet.backends.rollout.sglang import adapter
from ratchet.backends.rollout.sglang.adapter import AdapterShape, AdapterWeights
from ratchet.backends.rollout.sglang.client import SGLangClient
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import ProbedSink, TensorSpec
from ratchet.types import Packed, WeightProbe

A, B, BASE = "base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight", "base 1a2b"
TENSORS = {BASE: torch.zeros(0, dtype=torch.uint8), A: torch.ones(2, 8), B: torch.ones(8, 2)}
SHAPE = AdapterShape((TensorSpec(A, "float32", (2, 8)), TensorSpec(B, "float32", (8, 2))), "{}")
RIGHT = WeightProbe(3, Packed.of([1, 2, 3], "int32"), Packed.of([-1.0, -1.0], "float32"))
WRONG = WeightProbe(3, Packed.of([1, 2, 3], "int32"), Packed.of([-1.0, -1.2], "float32"))


class World:
    def __init__(self, sink: AdapterWeights, stub: SGLangStub, folder: Path) -> None:
        self.sink = sink
        self.stub = stub
        self.folder = folder

    async def load(self, version: int, probe: WeightProbe = RIGHT) -> None:
        """As `finalize` does."""
        self.sink.expect(probe)
        try:
            await self.sink.pause("retract")
            await self.sink.write({name: TENSORS[name] for name in (BASE, A)})
            await self.sink.write({B: TENSORS[B]})
            await self.sink.stamp(version)
        finally:
            await self.sink.resume()

    def directories(self) -> list[Path]:
        return sorted(self.folder.glob("*/*"))


def run(folder: Path, body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(20):
            stub = await stack.enter_async_context(SGLangStub().serving())
            client = SGLangClient(stub.url)
            stack.push_async_callback(client.close)
            sink = AdapterWeights([client], SHAPE, directory=folder, tolerance=0.1, timeout_s=5.0)
            assert isinstance(sink, ProbedSink)
            stack.push_async_callback(sink.leave)
            await body(World(sink, stub, folder))
        assert stub.adapters == {}

    asyncio.run(main())
    assert [path for path in folder.iterdir() if path.name.startswith("ratchet-")] == []


def test_an_adapter_is_written_loaded_and_proved_under_a_name_of_its_own(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        await world.load(7)
        ((name, path),) = world.stub.adapters.items()
        assert name.endswith("version-7")
        assert dict(world.sink.fields(7)) == {"lora_path": name}
        written = load_file(Path(path) / "adapter_model.safetensors")
        assert set(written) == {A, B}
        assert torch.equal(written[B], TENSORS[B])
        assert (Path(path) / "adapter_config.json").read_text() == "{}"
        private = Path(path).parent
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        (scored,) = world.stub.called("/generate")
        assert scored["lora_path"] == name
        assert world.sink.version == 7
        assert world.stub.weight_version == "7"
        assert not world.stub.called("/pause_generation")  # what runs keeps its adapter

    run(tmp_path, body)


def test_the_adapter_before_goes_when_its_requests_have_ended(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        await world.load(7)
        (first,) = world.stub.adapters
        world.stub.hung.add("/unload_lora_adapter")  # as a server does while requests use it
        await world.load(8)
        assert world.sink.version == 8
        assert len(world.directories()) == 2
        world.stub.hung.clear()
        await world.stub.notify()
        await asyncio.gather(*world.sink._forgetting)
        assert first not in world.stub.adapters
        assert len(world.directories()) == 1

    run(tmp_path, body)


def test_a_refused_adapter_is_never_served_and_its_name_never_used_again(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        await world.load(7)
        with pytest.raises(WeightsMismatch, match="version 8"):
            await world.load(8, WRONG)
        assert world.sink.version is None
        assert not await world.sink.decided(8)
        await world.load(8)
        assert world.sink.version == 8
        await asyncio.gather(*world.sink._forgetting)
        loaded = [body["lora_name"] for body in world.stub.called("/load_lora_adapter")]
        assert len(set(loaded)) == 3
        assert list(world.stub.adapters) == [loaded[2]]
        assert len(world.directories()) == 1

    run(tmp_path, body)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("28")])
def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing_half_written(
    tmp_path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(world: World) -> None:
        await world.load(7)

        def full(tensors: object, path: Path, **others: object) -> None:
            path.write_bytes(b"half")
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(adapter, "save_file", full)
            with pytest.raises(TransferFailed, match=r"28.*rollout\.sglang\.adapter_dir") as e:
                await world.load(8)
        assert str(world.folder) in str(e.value)
        assert world.sink.version is None
        assert len(world.directories()) == 1
        assert len(world.stub.called("/load_lora_adapter")) == 1
        await world.load(8)
        assert world.sink.version == 8

    run(tmp_path, body)


def test_a_server_that_takes_no_adapter_has_none_of_it_left(tmp_path: Path) -> None:
    async def body(world: World) -> None:
        refusal = {"success": False, "error_message": "rank too high"}
        world.stub.answers["/load_lora_adapter"] = (400, refusal)
        with pytest.raises(TransferFailed, match="rank too high"):
            await world.load(7)
        assert world.sink.version is None

    run(tmp_path, body)


def test_the_shape_names_modules_as_sglang_does(tmp_path: Path) -> None:
    from tests.helpers.tiny_models import write_tiny_model

    from ratchet.config import LoraConfig

    model = write_tiny_model(tmp_path / "model")
    shape = AdapterShape.read(model, "float32", LoraConfig(rank=4, target_modules=("q_proj",)))
    config = json.loads(shape.config)
    assert config["target_modules"] == ["q_proj"]
    assert config["r"] == 4
    assert shape.specs[0].name.startswith("base model xxh3-128 ")
    assert {spec.shape for spec in shape.specs[1:]} == {(4, 32), (32, 4)}
