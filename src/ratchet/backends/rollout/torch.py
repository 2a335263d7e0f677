"""A rollout engine in one process: transformers' model, a batch of our own, one thread for torch.

Consumes requests and weights, produces completions. All torch work happens on one thread, which
takes commands from a queue between two steps, so a pause falls between two tokens and a stamp
between two samplings. It waits for a version (never stamped, or quarantined by a load that has not
ended), for `resume` while it is paused, and for requests; each of these arrives as a command. The
event loop only queues commands and resolves futures.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from ratchet.backends.models import (
    eos_token_ids,
    load_model,
    load_tokenizer,
    named_weights,
    weight_specs,
)
from ratchet.backends.rollout._batch import Batch, Outcome, Request
from ratchet.backends.rollout._selfcheck import check_generation
from ratchet.backends.rollout.base import Completion, EngineStats, SamplingParams
from ratchet.errors import GenerationFailed, PromptTooLong, RatchetError, WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ratchet.transport.weights.base import TensorSpec
    from ratchet.types import PauseMode, PolicyVersion

T = TypeVar("T")


class _Parts(NamedTuple):
    """What `start` loads."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    weights: Mapping[str, torch.Tensor]
    specs: Sequence[TensorSpec]
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
        chat_template: bool = False,
        max_batch_size: int = 512,
        threads: int = 1,
        device: str | None = None,
    ) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._chat_template = chat_template
        self._max_batch_size = max_batch_size
        self._threads = threads
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="torch-engine", daemon=True)
        # on the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: GenerationFailed | None = None
        self._calls: set[asyncio.Future[Any]] = set()
        self._requests: dict[Request, asyncio.Future[Completion]] = {}
        self._unsent: list[Request] = []
        # on the engine's thread; read anywhere
        self._busy_s, self._paused_s = 0.0, 0.0
        self._paused_at: float | None = None
        self._closing = False
        self._parts: _Parts | None = None

    # --- requests

    async def start(self) -> None:
        """Load model and tokenizer, and check that the model generates what it scores.

        Raises:
            ConfigError: if the directory cannot be used.
        """
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await self._call(self._load)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Generate one completion; see `RolloutEngine.generate`."""
        self._check_alive()
        _check_request(prompt_ids, params, self._loaded.vocabulary, self._loaded.context)
        request = Request(prompt_ids, params)
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
                self._commands.put(partial(self._loaded.batch.remove, request))
            raise
        finally:
            self._requests.pop(request, None)

    def encode(self, text: str) -> list[int]:
        """Turn a prompt into ids."""
        tokenizer = self._loaded.tokenizer
        if not self._chat_template:
            return list(tokenizer.encode(text))
        messages = [{"role": "user", "content": text}]
        return list(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn ids into text, without special tokens."""
        return str(self._loaded.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stats(self) -> EngineStats:
        """Return the running totals."""
        since = self._paused_at
        parts = self._parts
        running = 0 if parts is None else parts.batch.num_running
        return EngineStats(
            busy_s=self._busy_s,
            paused_s=self._paused_s + (0.0 if since is None else time.perf_counter() - since),
            generated_tokens=0 if parts is None else parts.batch.generated_tokens,
            running=running,
            waiting=max(0, len(self._requests) - running),
        )

    async def close(self) -> None:
        """Fail what is in flight and end the thread. Idempotent."""
        if self._loop is None or self._ended is not None:
            return
        self._commands.put(self._stop)
        await asyncio.to_thread(self._thread.join)
        self._end(GenerationFailed("the engine was closed"))

    # --- weights

    @property
    def version(self) -> PolicyVersion | None:
        """The version that generates now."""
        return None if self._parts is None else self._parts.batch.version

    def specs(self) -> Sequence[TensorSpec]:
        """Describe every parameter and persistent buffer."""
        return self._loaded.specs

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two tokens; "retract" also gives up the caches of what is running."""
        await self._call(partial(self._pause, mode))

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy values into the model; quarantined until `stamp`.

        Raises:
            WeightsMismatch: if a name, shape or dtype is not the model's; the text names it.
        """
        await self._call(partial(self._write, tensors))

    async def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Return the model's own tensors, not copies: they are good until the next `write`.

        Raises:
            WeightsMismatch: if the model has no such tensor.
        """
        return await self._call(lambda: [self._weight(name).detach() for name in names])

    async def stamp(self, version: PolicyVersion) -> None:
        """Declare the weights whole."""
        await self._call(partial(self._loaded.batch.stamp, version))

    async def resume(self) -> None:
        """Go on generating, as soon as there is a version."""
        await self._call(self._resume)

    # --- event loop side

    def _check_alive(self) -> None:
        if self._ended is not None:
            raise GenerationFailed(str(self._ended))

    @property
    def _loaded(self) -> _Parts:
        if self._parts is None:
            msg = "the engine was not started"
            raise GenerationFailed(msg)
        return self._parts

    def _send_requests(self) -> None:
        requests, self._unsent = self._unsent, []
        self._commands.put(partial(self._loaded.batch.add, requests))

    async def _call(self, command: Callable[[], T]) -> T:
        """Run a command on the engine's thread, between two steps."""
        self._check_alive()
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._commands.put(partial(self._execute, command, future))
        return await future

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        for request, result in outcomes:
            future = self._requests.get(request)
            if future is not None:
                _settle(future, result)

    def _end(self, reason: GenerationFailed) -> None:
        if self._ended is None:
            self._ended = reason
            for future in [*self._calls, *self._requests.values()]:
                _settle(future, GenerationFailed(str(reason)))

    # --- engine thread side

    def _main(self) -> None:
        try:
            self._take_commands()
            while not self._closing:
                self._step()
                self._take_commands()
        except Exception as error:  # noqa: BLE001 - whatever it is, all who wait must hear of it
            reason = GenerationFailed(f"the engine broke: {type(error).__name__}: {error}")
            self._notify(self._end, reason)

    @property
    def _can_step(self) -> bool:
        parts = self._parts
        return self._paused_at is None and parts is not None and parts.batch.has_work

    def _take_commands(self) -> None:
        while not self._closing and not (self._can_step and self._commands.empty()):
            self._commands.get()()

    def _step(self) -> None:
        began = time.perf_counter()
        outcomes = self._loaded.batch.step()
        self._busy_s += time.perf_counter() - began
        if outcomes:
            self._notify(self._deliver, outcomes)

    def _execute(self, command: Callable[[], T], future: asyncio.Future[T]) -> None:
        try:
            result: T | RatchetError = command()
        except RatchetError as error:
            result = error
        self._notify(_settle, future, result)

    def _notify(self, callback: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None  # noqa: S101 - set before the thread starts
        self._loop.call_soon_threadsafe(callback, *args)

    def _load(self) -> None:
        torch.set_num_threads(self._threads)
        tokenizer = load_tokenizer(self._model_dir)
        model = load_model(self._model_dir, self._dtype).to(self._device)
        check_generation(model, str(self._model_dir))
        self._parts = _Parts(
            model=model,
            tokenizer=tokenizer,
            weights=named_weights(model),
            specs=weight_specs(model),
            batch=Batch(model, eos_token_ids(model, tokenizer), self._max_batch_size),
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

    def _write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._loaded.batch.version = None
        for name, value in tensors.items():
            weight = self._weight(name)
            if weight.shape != value.shape or weight.dtype != value.dtype:
                msg = (
                    f"{name} is {weight.dtype} {tuple(weight.shape)} in the engine, and"
                    f" {value.dtype} {tuple(value.shape)} came"
                )
                raise WeightsMismatch(msg)
            with torch.no_grad():
                weight.copy_(value)

    def _weight(self, name: str) -> torch.Tensor:
        weight = self._loaded.weights.get(name)
        if weight is None:
            msg = f"the engine's model has no weight named {name!r}"
            raise WeightsMismatch(msg)
        return weight

    def _stop(self) -> None:
        self._closing = True


def _settle(future: asyncio.Future[Any], result: object) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


def _check_request(
    prompt_ids: Sequence[int], params: SamplingParams, vocabulary: int, context: int | None
) -> None:
    if len(prompt_ids) == 0:
        msg = "the prompt is empty"
        raise GenerationFailed(msg)
    if min(prompt_ids) < 0 or max(prompt_ids) >= vocabulary:
        outside = next(token for token in prompt_ids if not 0 <= token < vocabulary)
        msg = f"token id {outside} is outside the vocabulary of {vocabulary}"
        raise GenerationFailed(msg)
    if params.max_tokens < 1 or not 0 <= params.temperature < float("inf"):
        msg = f"max_tokens must be positive and temperature finite and not negative: {params}"
        raise GenerationFailed(msg)
    if context is not None and len(prompt_ids) + params.max_tokens > context:
        msg = (
            f"{len(prompt_ids)} prompt tokens and max_tokens = {params.max_tokens} do not fit"
            f" into the context of {context}"
        )
        raise PromptTooLong(msg)
