"""The model in training: what the training backend does on its torch thread.

Consumes a model directory and rows, produces gradients, steps and weights; waits for nothing but
the other ranks. Plain blocking calls, one after another: `fsdp.py` gives them their thread.
"""

from __future__ import annotations

import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from errno import EIO
from pathlib import Path
from typing import Final, NamedTuple

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ratchet.algorithms.losses import Loss, sft_loss
from ratchet.algorithms.packing import Row
from ratchet.backends.lora import adapter_weights, add_adapter, merge_adapter, save_adapter
from ratchet.backends.models import load_model, load_tokenizer, save_model_directory
from ratchet.backends.named_weights import named_weights, weight_specs
from ratchet.backends.training.base import GradientReport, StepReport
from ratchet.backends.training.gradients import GradientPass
from ratchet.backends.training.optimizer import Optimizer
from ratchet.backends.training.probe import compute_probe
from ratchet.backends.training.saved_state import (
    Part,
    copy_parts,
    read_parts,
    saved_names,
)
from ratchet.backends.training.sharding import current_ranks, max_over_ranks, shard, whole
from ratchet.backends.training.warm_start import reference_rows, shuffled_batches
from ratchet.config import Config
from ratchet.errors import RunFailed, UserError
from ratchet.types import Prompt, WeightProbe


class _Random(NamedTuple):
    get: Callable[[], torch.Tensor]
    set: Callable[[torch.Tensor], None]


_RANDOM: Final = {
    "cpu": _Random(torch.get_rng_state, torch.set_rng_state),
    "cuda": _Random(torch.cuda.get_rng_state, torch.cuda.set_rng_state),
}
"""the generators whose state is saved, by the type of device"""


class Learner:
    """One model and its optimiser, from load to export."""

    def __init__(self, model_dir: Path, config: Config, device_name: str | None) -> None:
        self.ranks = current_ranks()
        self._config = config
        self._model_dir = model_dir
        self._device = device = _device(device_name, self.ranks.rank)
        self._tokenizer: PreTrainedTokenizerBase = load_tokenizer(model_dir)
        model = load_model(model_dir, config.model.dtype)
        lora = config.model.lora
        digest = None if lora is None else add_adapter(model, lora, config.seed)
        self._model: PreTrainedModel = model.to(device)
        shard(self._model, self.ranks, device)
        self._base = {} if digest is None else {f"base.{digest}": torch.ones(1)}
        """its name says which weights an adapter belongs to"""
        self._weights = named_weights(model) if digest is None else adapter_weights(model, digest)
        self.specs = weight_specs(self._weights)
        self._optimizer = self._trainer_optimizer()
        self._passes = GradientPass(
            self._model,
            device=device,
            ranks=self.ranks,
            max_tokens=config.trainer.micro_batch_tokens,
            temperature=config.rollout.temperature,
            entropy_gradient=config.algorithm.entropy_coef != 0.0,
        )
        self._pending: float | None = None
        """norm of the gradients that wait for a step; NaN if the loss was not finite"""

    def forward_backward(self, rows: Sequence[Row], loss: Loss) -> GradientReport:
        """Leave the gradients of the mean loss on the model."""
        self._check_none_pending()
        if not rows:
            msg = "a batch has at least one token that is trained"
            raise ValueError(msg)
        try:
            metrics = self._passes.run(rows, loss, self._optimizer.take_gradients)
        except BaseException:
            self.skip_step()  # drops the gradients of the micro-batches before the failure
            raise
        norm = self._optimizer.gradient_norm()
        self._pending = norm if math.isfinite(metrics["loss"]) else math.nan
        return GradientReport(math.isfinite(self._pending), metrics)

    def optimizer_step(self) -> StepReport:
        """Apply the gradients that wait, or refuse them."""
        if self._pending is None:
            msg = "there are no gradients: call forward_backward first"
            raise RuntimeError(msg)
        norm, self._pending = self._pending, None
        lr = self._optimizer.next_lr
        applied = self._optimizer.step(norm)
        return StepReport(applied, {"grad_norm": norm, "lr": lr})

    def skip_step(self) -> None:
        """Throw the gradients away."""
        self._pending = None
        self._optimizer.drop_gradients()

    def begin_warm_start(self, prompts: Sequence[Prompt]) -> Iterator[list[Row]]:
        """Change to the optimiser of the warm start; return an endless stream of batches."""
        self._check_none_pending()
        settings = self._config.warm_start
        chat_template = self._config.model.chat_template
        rows = reference_rows(prompts, self._tokenizer, chat_template=chat_template)
        self._optimizer = self._make_optimizer(settings.lr, settings.lr_warmup_steps)
        return shuffled_batches(rows, settings.batch_size, self._config.seed)

    def warm_start_step(self, rows: Sequence[Row], step: int) -> Mapping[str, float]:
        """Take one SFT step; return its metrics."""
        gradients = self.forward_backward(rows, sft_loss)
        report = self.optimizer_step()
        if not report.applied:
            msg = (
                f"warm start: step {step} is not finite (loss {gradients.metrics['loss']}, gradient"
                f" norm {report.metrics['grad_norm']}); use a smaller warm_start.lr than"
                f" {self._config.warm_start.lr}"
            )
            raise RunFailed(msg)
        return gradients.metrics

    def end_warm_start(self) -> None:
        """Change to a fresh optimiser for the training that follows."""
        self.skip_step()
        self._optimizer = self._trainer_optimizer()

    def read(self, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the full tensors, detached."""
        return [whole(self._weights[name]) for name in names]

    def probe(self, seed: int) -> WeightProbe:
        """Compute log probabilities with the weights as they are; on every rank the same."""
        return compute_probe(self._model, self._device, seed)

    def copy_state(self) -> dict[str, Part]:
        """Copy what this rank writes of all that training goes on from."""
        optimizer = {f"optimizer.{name}": t for name, t in self._optimizer.state().items()}
        shared = {**self._model_state(), **self._base, **optimizer}
        return copy_parts(shared, self._random_state(), self.ranks)

    def agree_on_write(self, written: Callable[[], BaseException | None]) -> None:
        """Wait until this rank and all others have written.

        Raises:
            OSError: if one of them could not; the same on all.
        """
        error = written()
        number = error.errno or EIO if isinstance(error, OSError) else EIO if error else 0
        worst = int(max_over_ranks(torch.tensor(number, device=self._device), self.ranks))
        if worst:
            raise OSError(worst, os.strerror(worst)) from error

    def restore(self, directory: Path) -> None:
        """Take on the state that was written into a directory, by any number of ranks.

        Raises:
            UserError: if it is of an adapter to other weights.
        """
        self._check_none_pending()
        saved = saved_names(directory)
        bases = {name for name in saved if name.startswith("base.")}
        if bases and not bases & self._base.keys():
            msg = (
                f"{directory} has an adapter to other weights than those in model.path"
                f" ({self._model_dir}): these have changed; go on with the ones that it began with"
            )
            raise UserError(msg)
        read_parts(self._model_state(), directory)
        self._optimizer.restore(
            lambda tensors: read_parts({f"optimizer.{n}": t for n, t in tensors.items()}, directory)
        )
        random = self._random_state()
        if random.keys() <= saved:  # else by fewer ranks, or on other devices
            read_parts(random, directory)
            for name, state in random.items():
                _RANDOM[name.split(".")[1]].set(state)

    def _model_state(self) -> dict[str, torch.Tensor]:
        names = [spec.name for spec in self.specs if spec.alias_of is None]
        return {f"model.{name}": self._weights[name] for name in names}

    def _random_state(self) -> dict[str, torch.Tensor]:
        kinds = {"cpu", self._device.type} & _RANDOM.keys()
        return {f"random.{kind}.{self.ranks.rank}": _RANDOM[kind].get() for kind in sorted(kinds)}

    def export(self, path: Path) -> None:
        """Write a directory that appears whole or not at all; rank 0 looks and writes, as the other
        ranks may be on machines with other files.
        """
        taken = torch.tensor(self.ranks.rank == 0 and path.exists(), device=self._device)
        if max_over_ranks(taken.to(torch.int32), self.ranks):
            msg = f"{path} is there already"
            raise FileExistsError(msg)
        write = self._prepare_export()
        if self.ranks.rank:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        try:
            write(temporary)
            temporary.rename(path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _prepare_export(self) -> Callable[[Path], None]:
        """Gather, in which all ranks take part, what the returned function then writes."""
        if self._config.model.lora is None:
            model = self._plain_model()
            return lambda path: save_model_directory(model, self._tokenizer, path)
        values = {name: whole(tensor) for name, tensor in self._weights.items()}
        return lambda path: self._write_adapter(values, path)

    def _write_adapter(self, values: Mapping[str, torch.Tensor], path: Path) -> None:
        save_adapter(self._model, values, self._model_dir, path)
        self._tokenizer.save_pretrained(path)
        model = self._config.model
        if model.lora is not None and model.lora.export_merged:
            merged = merge_adapter(self._model_dir, model.dtype, path)
            save_model_directory(merged, self._tokenizer, path / "merged")

    def _check_none_pending(self) -> None:
        if self._pending is not None:
            msg = "gradients are waiting: call optimizer_step or skip_step first"
            raise RuntimeError(msg)

    def _trainer_optimizer(self) -> Optimizer:
        trainer = self._config.trainer
        return self._make_optimizer(trainer.lr, trainer.lr_warmup_steps)

    def _make_optimizer(self, lr: float, warmup_steps: int) -> Optimizer:
        trainer = self._config.trainer
        return Optimizer(
            self._model.parameters(),
            lr=lr,
            warmup_steps=warmup_steps,
            betas=trainer.betas,
            weight_decay=trainer.weight_decay,
            max_grad_norm=trainer.max_grad_norm,
        )

    def _plain_model(self) -> PreTrainedModel:
        """Return the model, or an unsharded copy of it on the CPU."""
        if self.ranks.size == 1:
            return self._model
        values = {name: whole(tensor).cpu() for name, tensor in self._weights.items()}
        dtype = getattr(torch, self._config.model.dtype)
        model = AutoModelForCausalLM.from_config(self._model.config, dtype=dtype)
        model.load_state_dict(values)
        return model


def _device(name: str | None, rank: int) -> torch.device:
    if name is None:
        name = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device
