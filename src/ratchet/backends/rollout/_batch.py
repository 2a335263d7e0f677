"""The running batch: sequences join, take tokens together, and leave.

Consumes sequences and a model, produces finished completions, one step at a time; a step is either
the prefill of some waiting prompts or one more token for everybody. Waits for nothing: whoever owns
it decides when to step. It lives on one thread. Shapes: N rows of capacity, n running, J joining, U
different prompts among them, P their padded length, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ratchet.backends.rollout._kv_cache import Decode, Prefill, SlotCache
from ratchet.backends.rollout._masks import MaskBuilder
from ratchet.backends.rollout._request import Request
from ratchet.backends.rollout._sampling import sample, uniforms
from ratchet.backends.rollout.base import Completion
from ratchet.errors import GenerationFailed
from ratchet.types import PolicyVersion

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedModel

PREFILL_TOKENS: Final = 16384
"""Padded tokens of one prefill; more waiting prompts take several, with control in between."""

_ROW: Final = np.dtype(
    [
        ("length", np.int64),  # slots of the cache that are filled
        ("last", np.int64),  # the newest token, not in the cache yet
        ("made", np.int64),  # tokens sampled so far
        ("limit", np.int64),
        ("stream", np.uint64),
        ("temperature", np.float32),
    ],
    align=True,
)


Outcome = tuple[Request, Completion | GenerationFailed]


class Batch:
    """Everything that one engine has in flight. Without a version it must not be stepped."""

    def __init__(self, model: PreTrainedModel, eos: Iterable[int], max_rows: int) -> None:
        self.version: PolicyVersion | None = None
        self.waiting: deque[Request] = deque()
        self.generated_tokens = 0
        self._running: list[Request] = []
        self._model = model
        self._device: torch.device = model.device
        self._eos = np.array(sorted(eos), dtype=np.int64)
        self._max_rows = max_rows
        self._masks = MaskBuilder(model)
        self._cache = SlotCache(model.config.num_hidden_layers, max_rows)
        self._rows = np.zeros(0, _ROW)
        self._tokens = np.zeros((0, 0), "<i4")
        self._logprobs = np.zeros((0, 0), "<f4")

    @property
    def num_running(self) -> int:
        """Sequences in rows."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.version is not None and bool(self._running or self.waiting)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue sequences; they join at the next step that has room."""
        self.waiting.extend(requests)

    def remove(self, request: Request) -> None:
        """Forget a sequence, wherever it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        elif request in self._running:
            self._leave(np.array([self._running.index(request)]))

    def stamp(self, version: PolicyVersion) -> None:
        """The weights are whole: whatever is sampled from now on is made by `version`."""
        self.version = version
        for request, made in zip(self._running, self._rows["made"], strict=False):
            request.mark(int(made), version)

    def retract(self) -> None:
        """Send the running sequences back to the head of the queue, tokens kept, caches not."""
        for row, request in reversed(list(enumerate(self._running))):
            request.tokens, request.logprobs = self._taken(row)
            self.waiting.appendleft(request)
        self._running.clear()

    @torch.inference_mode()
    def step(self) -> list[Outcome]:
        """Let waiting sequences join, or else give every running one its next token."""
        if self.waiting and self.num_running < self._max_rows:
            return self._admit(self._next_requests())
        return self._decode()

    def _next_requests(self) -> list[Request]:
        room, longest, taken = self._max_rows - self.num_running, 0, 0
        for request in itertools.islice(self.waiting, room):
            longest = max(longest, len(request.prompt) + len(request.tokens))
            if taken and (taken + 1) * longest > PREFILL_TOKENS:
                break
            taken += 1
        return [self.waiting.popleft() for _ in range(taken)]

    def _admit(self, joining: list[Request]) -> list[Outcome]:
        contexts, prompt = _distinct([request.context for request in joining])
        lengths = np.array([len(context) for context in contexts])
        width = int(lengths.max())
        padding = width - lengths[:, None]
        columns = np.arange(width)
        ids = np.zeros((len(contexts), width), np.int64)
        for row, context in enumerate(contexts):
            ids[row, padding[row, 0] :] = context
        first = self.num_running
        self._reserve(first + len(joining), width + 1)
        self._cache.plan = Prefill(
            first,
            self._tensor(prompt[:, None]),
            self._tensor(np.minimum(columns + padding, width - 1)[prompt]),
        )
        logits = self._forward(
            input_ids=self._tensor(ids),
            attention_mask=self._tensor((columns >= padding).astype(np.int64)),
            position_ids=self._tensor(np.maximum(columns - padding, 0)),
        )
        self._seat(joining, lengths[prompt])
        return self._sample(logits[self._tensor(prompt)], first)

    def _seat(self, joining: list[Request], lengths: npt.NDArray[np.int64]) -> None:
        assert self.version is not None  # noqa: S101 - the owner steps only with a version
        first = self.num_running
        self._running += joining
        rows = [
            (length, 0, len(r.tokens), r.params.max_tokens, r.stream, r.params.temperature)
            for r, length in zip(joining, lengths.tolist(), strict=True)
        ]
        self._rows[first : self.num_running] = rows
        self._widen(max(len(request.tokens) for request in joining))
        for row, request in enumerate(joining, first):
            made = len(request.tokens)
            request.mark(made, self.version)
            if made:
                self._tokens[row, :made], self._logprobs[row, :made] = (
                    request.tokens,
                    request.logprobs,
                )

    def _decode(self) -> list[Outcome]:
        count = self.num_running
        rows = self._rows[:count]
        lengths = rows["length"]
        window = int(lengths.max()) + 1
        self._reserve(count, window)
        positions = self._tensor(lengths[:, None])
        self._cache.plan = Decode(count, window, positions[:, 0])
        logits = self._forward(
            input_ids=self._tensor(rows["last"][:, None]),
            attention_mask=self._masks.decode(positions, window),
            position_ids=positions,
        )
        lengths += 1
        return self._sample(logits, 0)

    def _forward(self, **inputs: Any) -> torch.Tensor:
        output = self._model(**inputs, cache=self._cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _sample(self, logits: torch.Tensor, first: int) -> list[Outcome]:
        rows = self._rows[first : self.num_running]
        made = rows["made"]
        tokens, logprobs = sample(logits, rows["temperature"], uniforms(rows["stream"], made))
        self._widen(int(made.max()) + 1)
        places = np.arange(first, self.num_running)
        self._tokens[places, made], self._logprobs[places, made] = tokens, logprobs
        rows["last"] = tokens
        made += 1
        self.generated_tokens += len(rows)
        stopped, broken = np.isin(tokens, self._eos), np.isnan(logprobs)
        ended = np.flatnonzero(stopped | broken | (made >= rows["limit"]))
        if not len(ended):
            return []
        outcomes = [
            self._outcome(first + index, stopped[index], broken[index]) for index in ended.tolist()
        ]
        if broken.any():
            self._cache.clear(self._tensor(first + np.flatnonzero(broken)))
        self._leave(first + ended)
        return outcomes

    def _outcome(self, row: int, stopped: np.bool_, broken: np.bool_) -> Outcome:
        request = self._running[row]
        if broken:
            msg = f"the logits of version {self.version} are not finite"
            return request, GenerationFailed(msg)
        return request, request.completion(*self._taken(row), bool(stopped))

    @torch.inference_mode()
    def _leave(self, leaving: npt.NDArray[np.int64]) -> None:
        """Free some rows; the last ones move into the holes."""
        remaining = self.num_running - len(leaving)
        stays = np.ones(self.num_running, np.bool_)
        stays[leaving] = False
        holes = np.flatnonzero(~stays[:remaining])
        movers = remaining + np.flatnonzero(stays[remaining:])
        if len(holes):
            window = int(self._rows["length"][movers].max())
            self._cache.move(self._tensor(movers), self._tensor(holes), window)
            for store in (self._rows, self._tokens, self._logprobs):
                store[holes] = store[movers]
            for hole, mover in zip(holes.tolist(), movers.tolist(), strict=True):
                self._running[hole] = self._running[mover]
        del self._running[remaining:]

    def _taken(self, row: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        made = self._rows["made"][row]
        return self._tokens[row, :made].copy(), self._logprobs[row, :made].copy()

    def _reserve(self, rows: int, slots: int) -> None:
        self._cache.reserve(rows, slots)
        missing = self._cache.num_rows - len(self._rows)
        if missing:
            self._rows = np.pad(self._rows, (0, missing))
            self._tokens = np.pad(self._tokens, ((0, missing), (0, 0)))
            self._logprobs = np.pad(self._logprobs, ((0, missing), (0, 0)))

    def _widen(self, columns: int) -> None:
        if columns > self._tokens.shape[1]:
            extra = ((0, 0), (0, max(columns, 16)))
            self._tokens, self._logprobs = (
                np.pad(self._tokens, extra),
                np.pad(self._logprobs, extra),
            )

    def _tensor(self, values: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


def _distinct(
    contexts: list[npt.NDArray[np.int64]],
) -> tuple[list[npt.NDArray[np.int64]], npt.NDArray[np.int64]]:
    """Siblings of a group share their prompt: return each once, and the index of everyone's."""
    seen: dict[bytes, int] = {}
    index = [seen.setdefault(context.tobytes(), len(seen)) for context in contexts]
    return [np.frombuffer(data, np.int64) for data in seen], np.array(index)
