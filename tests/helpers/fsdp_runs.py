"""Something to do with one FSDP backend, from its start to its close."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import torch
from tests.helpers.training import training_config

from ratchet.backends.training.fsdp import FsdpBackend
from ratchet.config import Config
from ratchet.types import RolloutGroup


def run(
    base: Path, body: Callable[[FsdpBackend], Awaitable[None]], config: Config | None = None
) -> None:
    async def main() -> None:
        backend = FsdpBackend(base, config=config or training_config(), device="cpu")
        async with asyncio.timeout(60):
            await backend.start()
            try:
                await body(backend)
            finally:
                await backend.close()

    asyncio.run(main())


def weights(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    names = [spec.name for spec in backend.specs()]
    return {name: value.clone() for name, value in zip(names, backend.read(names), strict=True)}


def replace_rollouts(group: RolloutGroup, **changes: object) -> RolloutGroup:
    rollouts = tuple(msgspec.structs.replace(r, **changes) for r in group.rollouts)
    return msgspec.structs.replace(group, rollouts=rollouts)
