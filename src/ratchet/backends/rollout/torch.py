"""A rollout engine in one process: transformers' model, a batch of our own, one thread for torch.

Consumes requests and weights, produces completions. All torch work happens on one thread, which
takes commands from a queue between two steps, so a pause falls between two tokens and a stamp
between two samplings. It waits for a version (never stamped, or quarantined by a load that has not
ended), for `resume` while it is paused, and for requests; each of these arrives as a command. The
event loop only queues commands and resolves futures.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from ratchet.backends.models import eos_token_ids, load_tokenizer
from ratchet.backends.rollout._batch import Batch, Outcome
from ratchet.backends.rollout._request import Request
from ratchet.backends.rollout._selfcheck import check_generation
from ratchet.backends.rollout._text import TextCodec
from ratchet.backends.rollout._thread import StepThread, settle
from ratchet.backends.rollout._weights import EngineWeights, open_model
from ratchet.backends.rollout.base import Completion, EngineStats, SamplingParams
from ratchet.errors import EngineLost, GenerationFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from ratchet.config import Config, LoraConfig
    from ratchet.transport.weights.base import TensorSpec
    from ratchet.types import PauseMode, PolicyVersion


def create_engine(config: Config, model_dir: Path) -> TorchEngine:
    """Make the engine of a configuration; `model_dir` is the base model's directory."""
    return TorchEngine(
        model_dir,
        dtype=config.model.dtype,
        lora=config.model.lora,
        chat_template=config.model.chat_template,
        max_batch_size=config.rollout.max_batch_size,
        threads=config.runtime.threads,
    )


class _Parts(NamedTuple):
    """What `start` loads."""

    model: PreTrainedModel
    text: TextCodec
    weights: EngineWeights
    batch: Batch
    vocabulary: int
    context: int | None


class TorchEngine:
    """A `RolloutEngine` for any causal language model of transformers, on a CPU or a GPU."""

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str = "float32",
        lora: LoraConfig | None = None,
        chat_template: bool = False,
        max_batch_size: int = 512,
        threads: int = 1,
        device: str | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._lora = lora
        self._chat_template = chat_template
        self._max_batch_size = max_batch_size
        self._threads = threads
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._thread = StepThread(step=self._step, can_step=self._can_step, ended=self._end)
        # on the event loop
        self._requests: dict[Request, asyncio.Future[Completion]] = {}
        self._unsent: list[Request] = []
        # on the engine's thread; read anywhere
        self._busy: tuple[float, float | None] = 0.0, None
        """seconds of all steps that have ended, and when the one began that has not"""
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self._parts: _Parts | None = None

    # --- requests

    async def start(self) -> None:
        """Load model and tokenizer, and check that the model generates what it scores.

        Raises:
            ConfigError: if the directory cannot be used.
        """
        self._thread.start()
        await self._thread.call(self._load)

    async def watch(self) -> None:
        """Raise `EngineLost` once the engine's thread breaks."""
        raise EngineLost(await self._thread.broken())

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Generate one completion; see `RolloutEngine.generate`."""
        self._thread.check()
        parts = self._loaded
        request = Request.checked(
            prompt_ids, params, vocabulary=parts.vocabulary, context=parts.context
        )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._requests[request] = future
        if not self._unsent:
            # requests of one turn of the loop go over together, so that they are prefilled together
            loop.call_soon(self._send_requests)
        self._unsent.append(request)
        try:
            return await future
        except asyncio.CancelledError:
            if request in self._unsent:
                self._unsent.remove(request)
            else:
                self._thread.put(partial(parts.batch.remove, request))
            raise
        finally:
            self._requests.pop(request, None)

    def encode(self, text: str) -> list[int]:
        """Turn a prompt into ids."""
        return self._loaded.text.encode(text)

    def encode_reply(self, text: str) -> list[int]:
        """Turn a message of the environment into ids behind a turn of the policy."""
        return self._loaded.text.encode_reply(text)

    @property
    def context(self) -> int | None:
        """Tokens that the model can see."""
        return self._loaded.context

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn ids into text, without the end of sequence."""
        return self._loaded.text.decode(token_ids)

    def stats(self) -> EngineStats:
        """Return the running totals."""
        since, (busy_s, stepping) = self._paused_at, self._busy
        parts = self._parts
        running = 0 if parts is None or self._thread.has_ended else parts.batch.num_running
        return EngineStats(
            busy_s=busy_s + (0.0 if stepping is None else time.perf_counter() - stepping),
            paused_s=self._paused_s + (0.0 if since is None else time.perf_counter() - since),
            generated_tokens=0 if parts is None else parts.batch.generated_tokens,
            running=running,
            waiting=max(0, len(self._requests) - running),
        )

    async def close(self) -> None:
        """Fail what is in flight and end the thread. Idempotent."""
        await self._thread.stop()

    # --- weights

    @property
    def version(self) -> PolicyVersion | None:
        """The version that generates now."""
        if self._parts is None or self._thread.has_ended:
            return None
        return self._parts.batch.version

    def specs(self) -> Sequence[TensorSpec]:
        """Describe every parameter and persistent buffer; with LoRA the adapter's alone."""
        return self._loaded.weights.specs

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two tokens; "retract" also gives up the caches of what is running."""
        await self._thread.call(partial(self._pause, mode))

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy values into the model; quarantined until `stamp`.

        Raises:
            WeightsMismatch: if a name, shape or dtype is not the model's; the text names it.
        """
        await self._thread.call(partial(self._write, tensors))

    @property
    def adopts(self) -> torch.device | None:
        """Host memory, for a whole model there; a GPU copies in no time, an adapter is small."""
        on_host = torch.device(self._device).type == "cpu"
        return torch.device("cpu") if on_host and self._lora is None else None

    async def adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Generate with these tensors themselves; quarantined until `stamp`; raises as `write`."""
        await self._thread.call(partial(self._adopt, tensors))

    async def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Return the model's own tensors, not copies: they are good until the next `write`.

        Raises:
            WeightsMismatch: if the model has no such tensor.
        """
        return await self._thread.call(partial(self._loaded.weights.read, names))

    async def stamp(self, version: PolicyVersion) -> None:
        """Declare the weights whole."""
        await self._thread.call(partial(self._loaded.batch.stamp, version))

    async def resume(self) -> None:
        """Go on generating, as soon as there is a version."""
        await self._thread.call(self._resume)

    # --- event loop side

    @property
    def _loaded(self) -> _Parts:
        if self._parts is None:
            msg = "the engine was not started"
            raise GenerationFailed(msg)
        return self._parts

    def _send_requests(self) -> None:
        requests, self._unsent = self._unsent, []
        self._thread.put(partial(self._loaded.batch.add, requests))

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        for request, result in outcomes:
            future = self._requests.get(request)
            if future is not None:
                settle(future, result)

    def _end(self, reason: GenerationFailed) -> None:
        for future in list(self._requests.values()):
            settle(future, GenerationFailed(str(reason)))

    # --- engine thread side

    def _can_step(self) -> bool:
        parts = self._parts
        return self._paused_at is None and parts is not None and parts.batch.has_work

    def _step(self) -> None:
        busy_s, began = self._busy[0], time.perf_counter()
        self._busy = busy_s, began
        outcomes = self._loaded.batch.step()
        self._busy = busy_s + time.perf_counter() - began, None
        if outcomes:
            self._thread.notify(self._deliver, outcomes)

    def _load(self) -> None:
        torch.set_num_threads(self._threads)
        tokenizer = load_tokenizer(self._model_dir)
        model, weights = open_model(self._model_dir, self._dtype, self._lora, self._device)
        check_generation(model, str(self._model_dir))
        end_ids = eos_token_ids(model, tokenizer)
        self._parts = _Parts(
            model=model,
            text=TextCodec(tokenizer, self._chat_template, end_ids),
            weights=weights,
            batch=Batch(model, end_ids, self._max_batch_size),
            vocabulary=model.get_input_embeddings().num_embeddings,
            context=getattr(model.config, "max_position_embeddings", None),
        )

    def _pause(self, mode: PauseMode) -> None:
        if self._paused_at is None:
            self._paused_at = time.perf_counter()
        if mode == "retract":
            self._loaded.batch.retract()

    def _resume(self) -> None:
        if self._paused_at is not None:
            self._paused_s += time.perf_counter() - self._paused_at
            self._paused_at = None

    def _adopt(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._loaded.batch.version = None
        self._loaded.weights.adopt(tensors)

    def _write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._loaded.batch.version = None
        self._loaded.weights.write(tensors)
