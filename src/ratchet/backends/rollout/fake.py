"""A rollout engine without a model: deterministic, scripted, and as slow as asked.

Consumes requests, weights and a script of delays, produces completions whose tokens are a function
of the weights that made them, so that a wrong version stamp can be proved. It waits on the loop's
clock only (a virtual one will do), for a version, and for `resume`; loads unblock it. Torch is
imported only where a real transport reads the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from ratchet.backends.rollout.base import Completion, EngineStats, SamplingParams
from ratchet.errors import EngineLost, GenerationFailed, PromptTooLong, WeightsMismatch
from ratchet.transport.weights.base import TensorSpec
from ratchet.types import FinishReason, Packed, PauseMode, PolicyVersion, VersionSpan

if TYPE_CHECKING:
    import torch

NAME: Final = "w"
"""the only weight"""

VOCABULARY: Final = 256
"""ids are the characters of Latin-1; no id ends a completion"""


def fake_token(
    weights: npt.NDArray[np.float32], prompt_ids: Sequence[int], seed: int, position: int
) -> tuple[int, float]:
    """Return the token that these weights make at a position, and its log probability."""
    digest = xxhash.xxh3_64(weights.tobytes())
    digest.update(np.array([seed, position, *prompt_ids], np.int64).tobytes())
    draw = digest.intdigest()
    return draw % VOCABULARY, -1.0 - (draw >> 32) / 2**32


class FakeEngine:
    """A `RolloutEngine` whose weight "w" is a small vector of float32."""

    def __init__(
        self,
        *,
        delay_s: Callable[[Sequence[int], SamplingParams], float] = lambda *_: 0.0,
        stop_after: Callable[[Sequence[int], SamplingParams], int] | None = None,
        size: int = 4,
        context: int = 4096,
    ) -> None:
        """Script the engine.

        Args:
            delay_s: seconds that a whole completion takes, spread over its tokens; may raise
                `GenerationFailed`.
            stop_after: tokens after which a completion ends by itself; none does by default.
            size: numbers in "w".
            context: tokens that prompt and completion may have together.
        """
        self._delay_s = delay_s
        self._stop_after = stop_after
        self.context = context
        self._weights = np.zeros(size, np.float32)
        self._version: PolicyVersion | None = None
        self._paused = False
        self._closed = False
        self._reason = "the engine was closed"
        self._lost = asyncio.Event()
        self._ready = asyncio.Event()
        self._in_flight: dict[asyncio.Future[Completion], None] = {}  # ordered, as a set is not
        self._running = 0
        self._generated_tokens = 0
        self._busy_s, self._paused_s, self._counted_until = 0.0, 0.0, 0.0

    async def start(self) -> None:
        """Start the clock."""
        self._counted_until = asyncio.get_running_loop().time()

    async def watch(self) -> None:
        """Raise `EngineLost` after `lose`."""
        await self._lost.wait()
        raise EngineLost(self._reason)

    def lose(self, reason: str) -> None:
        """Script the end of the engine: it does not come back."""
        self._reason = reason
        self._end()
        self._lost.set()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Generate one completion; see `RolloutEngine.generate`."""
        if self._closed:
            raise GenerationFailed(self._reason)
        if not prompt_ids or not all(0 <= token < VOCABULARY for token in prompt_ids):
            msg = f"the prompt is empty or has an id outside the vocabulary of {VOCABULARY}"
            raise GenerationFailed(msg)
        if params.max_tokens < 1 or params.temperature < 0:
            msg = f"{params}: max_tokens must be positive, temperature not negative"
            raise GenerationFailed(msg)
        if len(prompt_ids) + params.max_tokens > self.context:
            msg = f"prompt and max_tokens do not fit into the context of {self.context}"
            raise PromptTooLong(msg)
        length = params.max_tokens
        if self._stop_after is not None:
            length = min(length, self._stop_after(prompt_ids, params))
        pause_s = self._delay_s(prompt_ids, params) / length
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        self._in_flight[future] = None
        task = loop.create_task(self._produce(tuple(prompt_ids), params, length, pause_s, future))
        try:
            return await future
        finally:
            self._in_flight.pop(future, None)
            task.cancel()

    def encode(self, text: str) -> list[int]:
        """Turn each character into its Latin-1 code."""
        return list(text.encode("latin-1", "replace"))

    def encode_reply(self, text: str) -> list[int]:
        """Turn each character into its Latin-1 code."""
        return self.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn each id into its Latin-1 character."""
        return bytes(token_ids).decode("latin-1")

    def stats(self) -> EngineStats:
        """Return the running totals."""
        self._count()
        return EngineStats(
            busy_s=self._busy_s,
            paused_s=self._paused_s,
            generated_tokens=self._generated_tokens,
            running=self._running,
            waiting=len(self._in_flight) - self._running,
        )

    async def close(self) -> None:
        """Fail what is in flight. Idempotent."""
        self._end()

    # --- weights

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        """A copy of "w" [size]."""
        return self._weights.copy()

    @property
    def version(self) -> PolicyVersion | None:
        """The version that generates now."""
        return self._version

    def specs(self) -> Sequence[TensorSpec]:
        """Describe "w"."""
        return (TensorSpec(NAME, "float32", self._weights.shape),)

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two tokens; there is no cache to give up."""
        self._change(paused=True)

    async def write(self, tensors: Mapping[str, Any]) -> None:
        """Take "w" from anything that numpy reads; quarantined until `stamp`.

        Raises:
            WeightsMismatch: if there is another name, dtype or shape.
        """
        self._change(version=None)
        for name, value in tensors.items():
            array = np.asarray(value)
            expected = (NAME, self._weights.dtype, self._weights.shape)
            if (name, array.dtype, array.shape) != expected:
                msg = f"{name} {array.dtype} {array.shape} came for {expected}"
                raise WeightsMismatch(msg)
            self._weights = array.copy()

    async def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Return "w" as often as it is named.

        Raises:
            WeightsMismatch: if there is another name.
        """
        import torch

        if set(names) - {NAME}:
            msg = f"the engine has {NAME!r} only, not {list(names)}"
            raise WeightsMismatch(msg)
        return [torch.from_numpy(self.weights) for _ in names]

    async def stamp(self, version: PolicyVersion) -> None:
        """Declare the weights whole."""
        self._change(version=version)

    async def resume(self) -> None:
        """Go on generating, as soon as there is a version."""
        self._change(paused=False)

    # --- inside

    def _end(self) -> None:
        self._closed = True
        self._change(version=None)
        for future in self._in_flight:
            if not future.done():
                future.set_exception(GenerationFailed(self._reason))

    async def _produce(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        length: int,
        pause_s: float,
        future: asyncio.Future[Completion],
    ) -> None:
        made: list[tuple[int, float, PolicyVersion]] = []
        await self._wait_for_version()
        self._count()
        self._running += 1
        try:
            for position in range(length):
                await asyncio.sleep(pause_s)
                version = await self._wait_for_version()
                made.append(
                    (*fake_token(self._weights, prompt_ids, params.seed, position), version)
                )
                self._generated_tokens += 1
        finally:
            self._count()
            self._running -= 1
        if not future.done():
            stopped = self._stop_after is not None and length < params.max_tokens
            future.set_result(_completion(made, "stop" if stopped else "length"))

    async def _wait_for_version(self) -> PolicyVersion:
        """Return without giving way to others between the check and the return."""
        while self._version is None or self._paused:
            await self._ready.wait()
        return self._version

    def _change(self, **state: Any) -> None:
        self._count()
        self._version = state.get("version", self._version)
        self._paused = state.get("paused", self._paused)
        if self._version is None or self._paused:
            self._ready.clear()
        else:
            self._ready.set()

    def _count(self) -> None:
        """Account for the time since the last change of state."""
        now = asyncio.get_running_loop().time()
        elapsed, self._counted_until = now - self._counted_until, now
        if self._paused:
            self._paused_s += elapsed
        elif self._running and self._version is not None:
            self._busy_s += elapsed


def _completion(
    made: Sequence[tuple[int, float, PolicyVersion]], finish_reason: FinishReason
) -> Completion:
    tokens, logprobs, versions = zip(*made, strict=True)
    starts = [i for i in range(len(made)) if i == 0 or versions[i] != versions[i - 1]]
    ends = [*starts[1:], len(made)]
    return Completion(
        token_ids=Packed.of(tokens, "int32"),
        logprobs=Packed.of(logprobs, "float32"),
        spans=tuple(
            VersionSpan(versions[start], start, end)
            for start, end in zip(starts, ends, strict=True)
        ),
        finish_reason=finish_reason,
    )
