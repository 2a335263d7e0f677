"""What the contract of training backends needs of each of them."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from tests.helpers.gang import SecondRank
from tests.helpers.training import training_config, write_model

from ratchet.backends.training.base import TrainingBackend
from ratchet.backends.training.fake import FakeBackend
from ratchet.backends.training.fsdp import create_backend
from ratchet.backends.training.ranks import Leader
from ratchet.config import LoraConfig

Body = Callable[[TrainingBackend], Awaitable[None]]


class Harness:
    """Makes backends of one kind, runs a test body on each, and closes it."""

    def __init__(self, kind: str, folder: Path, second: SecondRank | None) -> None:
        self.kind = kind
        self.folder = folder
        self._second = second
        config = training_config(warm_start={"steps": 3, "batch_size": 8})
        if kind.startswith("lora"):
            lora = config.model.model_copy(update={"lora": LoraConfig(rank=4)})
            config = config.model_copy(update={"model": lora})
        self._config = config
        self._model = folder / "base"
        if kind != "fake":
            write_model(self._config, self._model)

    def gang(self) -> AbstractContextManager[None]:
        """Around a backend: the other ranks, where there are any."""
        if self._second is None:
            return nullcontext()
        return self._second.meet(self._config.model_dump(mode="json"), self._model)

    def backend(self) -> TrainingBackend:
        if self.kind == "fake":
            return FakeBackend()
        backend = create_backend(self._config, self._model)
        assert isinstance(backend, Leader) == (self._second is not None)
        return backend

    def run(self, body: Body) -> None:
        async def main() -> None:
            backend = self.backend()
            async with asyncio.timeout(60):
                await backend.start()
                try:
                    await body(backend)
                finally:
                    await backend.close()

        with self.gang():
            asyncio.run(main())
        if self._second is not None:
            assert self._second.ended() == "closed"


def snapshot(backend: TrainingBackend) -> dict[str, torch.Tensor]:
    names = [spec.name for spec in backend.specs()]
    return {name: value.clone() for name, value in zip(names, backend.read(names), strict=True)}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )
