"""The training backend on PyTorch: one process, or several ranks that share the model with FSDP2.

Consumes a model directory and groups of rollouts; produces new weights, metrics and exported
models. Waits for nothing but its own ranks. All torch work runs on one thread of its own, in the
order of the calls; the event loop only awaits it.

Ranks: if the process has initialised torch.distributed before `start`, the model is sharded over
all of its processes. Each of them then makes the same calls with the same arguments in the same
order, and each gets the same reports. `ranks.py` sees to that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import torch

from ratchet.algorithms.packing import rollout_rows
from ratchet.algorithms.registry import make_advantage, make_loss
from ratchet.backends.training.base import GradientReport, StepReport, TrainingBackend
from ratchet.backends.training.learner import Learner
from ratchet.backends.training.ranks import lead
from ratchet.backends.training.saved_state import write_parts
from ratchet.config import Config
from ratchet.transport.weights.base import TensorSpec
from ratchet.types import Prompt, RolloutGroup, WeightProbe

T = TypeVar("T")


def create_backend(config: Config, model_dir: Path) -> TrainingBackend:
    """Return the backend that a configuration chooses as "fsdp"; rank 0's of several leads them."""
    return lead(FsdpBackend(model_dir, config=config))


class FsdpBackend:
    """A `TrainingBackend` for CPU and CUDA."""

    def __init__(self, model_dir: Path, *, config: Config, device: str | None = None) -> None:
        """Prepare; nothing is loaded before `start`.

        Args:
            model_dir: the base model, its config and tokenizer, in the Hugging Face layout.
            config: of the run; model, rollout.temperature, algorithm, warm_start, trainer and
                runtime.threads are used.
            device: torch name; by default this rank's GPU, or the CPU where there is none.

        Raises:
            ConfigError: if `algorithm` names an advantage or a loss that does not load.
        """
        self._model_dir = model_dir
        self._config = config
        self._device_name = device
        self._advantage = make_advantage(config.algorithm)
        self._loss = make_loss(config.algorithm)
        self._executor: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._learner: Learner | None = None
        self._writer: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    # --- life

    async def start(self) -> None:
        """Load the base model, and shard it where there are ranks.

        Raises:
            ConfigError: if the directory holds no such model.
        """
        self._learner = await self._on_thread(self._load)

    async def close(self) -> None:
        """Wait for the torch work and the writing in flight, then free everything."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._writer.shutdown)
        self._learner = None

    def _load(self) -> Learner:
        torch.set_num_threads(self._config.runtime.threads)
        return Learner(self._model_dir, self._config, self._device_name)

    # --- training

    async def warm_start(self, prompts: Sequence[Prompt]) -> Mapping[str, float]:
        """Train on the prompts' references for `warm_start.steps` steps, with an optimiser of its
        own; returns the last `loss`, and nothing where there are no steps to take.

        Raises:
            ConfigError: if a prompt has no reference.
            RunFailed: if a step is not finite.
        """
        settings = self._config.warm_start
        report: Mapping[str, float] = {}
        if not settings.steps:
            return report
        learner = self._started
        batches = await self._on_thread(learner.begin_warm_start, prompts)
        try:
            for step in range(1, settings.steps + 1):
                report = await self._on_thread(learner.warm_start_step, next(batches), step)
        finally:
            await self._on_thread(learner.end_warm_start)
        return report

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        """Compute the gradients of the configured loss; the weights stay as they are.

        Raises:
            ValueError: if no token of the groups is trained, or a rollout is malformed.
            RuntimeError: if the gradients of the last batch were neither applied nor thrown away.
        """
        return await self._on_thread(self._forward_backward, self._started, groups)

    def _forward_backward(self, learner: Learner, groups: Sequence[RolloutGroup]) -> GradientReport:
        return learner.forward_backward(rollout_rows(groups, self._advantage), self._loss)

    async def optimizer_step(self) -> StepReport:
        """Clip, apply, and drop the gradients.

        Raises:
            RuntimeError: if there are no gradients.
            RunFailed: if the device made weights that are not finite in spite of all checks.
        """
        return await self._on_thread(self._started.optimizer_step)

    async def skip_step(self) -> None:
        """Throw the gradients away; harmless when there are none."""
        await self._on_thread(self._started.skip_step)

    # --- weights

    def specs(self) -> Sequence[TensorSpec]:
        """Describe every parameter and persistent buffer, tied names included, in the model's
        order.
        """
        return self._started.specs

    def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Return the full, current tensors, detached. Alone: the parameters' own memory, at once.
        Sharded: gathered on the torch thread, after the work in flight.
        """
        learner = self._started
        if learner.ranks.size == 1:
            return learner.read(names)
        return self._executor.submit(learner.read, names).result()

    async def probe(self, seed: int) -> WeightProbe | None:
        """Compute what the weights as they are make of token ids from this seed."""
        return await self._on_thread(self._started.probe, seed)

    # --- state

    async def begin_save(self, directory: Path) -> None:
        """Copy the state into host memory, then write it on a thread of its own.

        Raises:
            RuntimeError: if one is being written.
        """
        if self._saving is not None:
            msg = "a state is being written: call end_save first"
            raise RuntimeError(msg)
        parts = await self._on_thread(self._started.copy_state)
        ranks = self._started.ranks
        self._saving = self._writer.submit(write_parts, parts, directory, ranks)

    async def written(self) -> None:
        """Wait until this rank has written, or could not."""
        if self._saving is not None:
            await asyncio.gather(asyncio.wrap_future(self._saving), return_exceptions=True)

    async def end_save(self) -> None:
        """Wait until every rank has written.

        Raises:
            OSError: if one of them could not; on every rank alike.
            RuntimeError: if nothing is being written.
        """
        await self.written()  # not on the torch thread: others train there meanwhile
        saving, self._saving = self._saving, None
        if saving is None:
            msg = "no state is being written: call begin_save first"
            raise RuntimeError(msg)
        await self._on_thread(self._started.agree_on_write, saving.exception)

    async def restore(self, directory: Path) -> None:
        """Go on from a saved state, of any number of ranks, instead of the base model.

        Raises:
            RuntimeError: if gradients wait for a step.
        """
        await self._on_thread(self._started.restore, directory)

    async def export(self, path: Path) -> None:
        """Write model, config and tokenizer; `path` appears whole or not at all.

        Raises:
            FileExistsError: if `path` is there already.
        """
        await self._on_thread(self._started.export, path)

    # --- helpers

    @property
    def _started(self) -> Learner:
        if self._learner is None:
            msg = "the training backend is not started, or it is closed"
            raise RuntimeError(msg)
        return self._learner

    async def _on_thread(self, function: Callable[..., T], *arguments: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, function, *arguments)
