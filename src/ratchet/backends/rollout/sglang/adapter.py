"""LoRA adapters: each version an adapter of its own in the servers, by way of the disk.

Consumes the buckets that the worker received and verified, produces servers that answer requests
for the adapter of a version. Waits for the disk, and for the servers to read what was written.

SGLang takes adapters as pickles or as files; these are safetensors in a directory that only this
user can read, gone with the version; what a killed worker has left goes when another starts. A name
is never used for two loads: a server that was told to forget an adapter answers requests for its
name all the same, from the path that it remembers. The requests of a version carry its name, so
what runs ends with the adapter that it began with, and nothing has to be paused; an old adapter
goes when the last of its requests has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import save_file

from ratchet.backends.lora import adapter_weights, add_adapter, save_adapter
from ratchet.backends.models import load_model
from ratchet.backends.named_weights import weight_specs
from ratchet.backends.rollout.sglang.proving import ProvenWeights
from ratchet.backends.rollout.sglang.session import LEAVE_S
from ratchet.errors import TransferFailed
from ratchet.private_folder import private_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ratchet.backends.rollout.sglang.client import SGLangClient
    from ratchet.config import LoraConfig
    from ratchet.transport.weights.base import TensorSpec
    from ratchet.types import PauseMode, PolicyVersion

_CONFIG: Final = "adapter_config.json"


class AdapterShape(NamedTuple):
    """What every adapter of a run has in common."""

    specs: tuple[TensorSpec, ...]
    """the digest of the base model among them, as the name of an empty tensor"""
    config: str
    """adapter_config.json"""

    @classmethod
    def read(cls, directory: Path, dtype: str, lora: LoraConfig) -> AdapterShape:
        """Load the base model for its digest, and let it go again; blocks.

        Raises:
            ConfigError: if the directory cannot be used, or has no such modules.
        """
        model = load_model(directory, dtype)
        weights = adapter_weights(model, add_adapter(model, lora, seed=0))
        with tempfile.TemporaryDirectory() as folder:
            save_adapter(model, {}, directory, Path(folder) / "adapter")
            config = json.loads((Path(folder) / "adapter" / _CONFIG).read_text(encoding="utf-8"))
        # SGLang knows modules by the last part of their names
        config["target_modules"] = sorted(
            {name.rpartition(".")[2] for name in config["target_modules"]}
        )
        return cls(weight_specs(weights), json.dumps(config, indent=2))


class AdapterWeights(ProvenWeights):
    """A `ProbedSink` whose weights are an adapter."""

    def __init__(
        self,
        servers: Sequence[SGLangClient],
        shape: AdapterShape,
        *,
        directory: Path | None = None,
        tolerance: float,
        timeout_s: float,
    ) -> None:
        """Hold no version yet.

        Args:
            servers: of one engine.
            shape: of the adapters.
            directory: where adapters are written, each in a private folder of its own; the servers
                read them there. By default the system's for temporary files.
            tolerance: of the probe.
            timeout_s: of each wait for the servers.
        """
        super().__init__(servers, shape.specs, tolerance=tolerance, timeout_s=timeout_s)
        self._config = shape.config
        self._directory = directory
        self._folder: Path | None = None
        self._name = f"ratchet-{uuid.uuid4().hex[:8]}"
        self._loads = 0
        self._arrived: dict[str, torch.Tensor] = {}
        self._names: dict[PolicyVersion, str] = {}
        """of the adapters that the servers may have"""
        self._forgetting: set[asyncio.Task[None]] = set()

    def fields(self, version: PolicyVersion) -> Mapping[str, Any]:
        """Name the adapter of the version."""
        return {"lora_path": self._names[version]}

    async def pause(self, mode: PauseMode) -> None:
        """Do nothing: what runs goes on with the adapter that it has."""

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep a part of the adapter; the engine holds no version until `stamp`."""
        self.version = None
        for name, tensor in tensors.items():
            self._arrived[name] = tensor.detach().to("cpu", copy=True)

    async def leave(self) -> None:
        """Forget all adapters, here and at the servers."""
        for version in list(self._names):
            self._forget_soon(version)
        if tasks := {*self._forgetting}:
            _, late = await asyncio.wait(tasks, timeout=LEAVE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    # --- `ProvenWeights`

    async def _install(self, version: PolicyVersion) -> None:
        arrived, self._arrived = self._arrived, {}
        self._loads += 1
        name = f"{self._name}-{self._loads}-version-{version}"
        path = await asyncio.to_thread(self._save, name, arrived)
        self._forget_soon(version)  # of a load that failed
        self._names[version] = name
        await self.session.load_adapter(name, str(path))
        await self.session.set_version(version)

    async def _proven(self) -> None:
        for version in [version for version in self._names if version != self.version]:
            self._forget_soon(version)

    async def _refuse(self) -> None:
        self.version = None

    # --- inside

    def _forget_soon(self, version: PolicyVersion) -> None:
        if (name := self._names.pop(version, None)) is not None:
            task = asyncio.create_task(self._forget(name))
            self._forgetting.add(task)
            task.add_done_callback(self._forgetting.discard)

    def _save(self, name: str, tensors: Mapping[str, torch.Tensor]) -> Path:
        """Write an adapter as PEFT reads it; blocks.

        Raises:
            TransferFailed: if the disk is full, or cannot be written to. Nothing is left behind.
        """
        parent = self._directory or Path(tempfile.gettempdir())
        path = None
        try:
            if self._folder is None:
                self._folder = private_folder("adapters", parent)
            path = self._folder / name
            path.mkdir()
            (path / _CONFIG).write_text(self._config, encoding="utf-8")
            save_file(
                {key: value for key, value in tensors.items() if value.numel()},
                path / "adapter_model.safetensors",
                metadata={"format": "pt"},
            )
        except (OSError, SafetensorError) as error:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            msg = (
                f"the adapter {name} could not be written to {self._folder or parent}: {error}. The"
                " servers read adapters from there: make room, or set rollout.sglang.adapter_dir"
            )
            raise TransferFailed(msg) from None
        return path

    async def _forget(self, name: str) -> None:
        """Have the servers unload an adapter, which waits for its requests; remove its files."""
        with contextlib.suppress(TransferFailed):  # a server that is gone has forgotten all
            await self.session.unload_adapter(name)
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)
