"""The keys and values of a running batch, in rows that the engine owns.

Consumes what attention layers compute, produces what they attend to, through the cache interface of
transformers. Sequences occupy the rows 0..n-1 without holes, each from slot 0; memory grows
geometrically and is never copied when a sequence joins; when one leaves, the last row moves into
its place. One `Plan` per forward pass says where the layers write. Waits for nothing. Shapes: N
rows of capacity, L slots of capacity, H key-value heads, D head dimension, U prompts of a prefill,
P their padded length.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class Prefill(NamedTuple):
    """Sequences that join: row `first + j` takes the slots `source[j]` of prompt `prompt[j]`."""

    first: int
    prompt: torch.Tensor
    """int64 [J, 1], which of the U prompts"""
    source: torch.Tensor
    """int64 [J, P], the padded positions in order, real ones first"""


class Decode(NamedTuple):
    """The rows 0..rows-1 each write one slot, and attend to the first `window`."""

    rows: int
    window: int
    slots: torch.Tensor
    """int64 [rows], where each writes"""


class SlotCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """All layers of the model, growing together."""

    def __init__(self, num_layers: int, max_rows: int) -> None:
        self.num_rows, self.num_slots = 0, 0
        self._max_rows = max_rows
        self._plan: Prefill | Decode | None = None
        self._places: dict[int, torch.Tensor] = {}
        super().__init__(layers=[_SlotLayer(self) for _ in range(num_layers)])

    @property
    def plan(self) -> Prefill | Decode:
        """What the forward pass is for; set before each one."""
        assert self._plan is not None  # noqa: S101 - the batch never runs the model without
        return self._plan

    @plan.setter
    def plan(self, plan: Prefill | Decode) -> None:
        self._plan = plan
        self._places.clear()

    def places(self, decode: Decode, heads: int) -> torch.Tensor:
        """Return int64 [rows * heads]: where a decode step writes, if [N, H, L] is seen flat. All
        layers with so many heads share it.
        """
        if heads not in self._places:
            device = decode.slots.device
            first = torch.arange(decode.rows * heads, device=device).view(-1, heads)
            self._places[heads] = (first * self.num_slots + decode.slots[:, None]).view(-1)
        return self._places[heads]

    def reserve(self, rows: int, slots: int) -> None:
        """Have room for so many rows and slots."""
        if rows <= self.num_rows and slots <= self.num_slots:
            return
        if rows > self.num_rows:
            self.num_rows = max(rows, min(2 * self.num_rows, self._max_rows))
        if slots > self.num_slots:
            self.num_slots = max(slots, 16, 2 * self.num_slots)
        for layer in self.layers:
            layer.grow()

    def move(self, sources: torch.Tensor, targets: torch.Tensor, slots: int) -> None:
        """Copy the first `slots` of some rows over other rows."""
        for layer in self.layers:
            for store in layer.stores():
                store[targets, :, :slots] = store[sources, :, :slots]

    def clear(self, rows: torch.Tensor) -> None:
        """Zero some rows: a NaN in a slot that is masked would still spread."""
        for layer in self.layers:
            for store in layer.stores():
                store[rows] = 0


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """`keys` and `values` are [N, H, L, D]; layers see them as [n, H, window, D]."""

    is_croppable = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = self._zeros(key_states)
        self.values = self._zeros(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store what was computed; return all that is attended to."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        match self._owner.plan:
            case Decode() as plan:
                places = self._owner.places(plan, key_states.shape[1])
                return (
                    _decode(self.keys, key_states, plan, places),
                    _decode(self.values, value_states, plan, places),
                )
            case Prefill() as plan:
                _prefill(self.keys, key_states, plan)
                _prefill(self.values, value_states, plan)
                return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Prefills start from nothing; decoding passes its own mask."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Rows differ in length, so positions are always passed explicitly."""
        return 0

    def get_max_length(self) -> int:
        return -1

    def stores(self) -> tuple[torch.Tensor, ...]:
        return (self.keys, self.values) if self.is_initialized else ()

    def grow(self) -> None:
        if self.is_initialized:
            self.keys, self.values = self._grown(self.keys), self._grown(self.values)

    def _grown(self, store: torch.Tensor) -> torch.Tensor:
        rows, heads, slots, width = store.shape
        larger = store.new_zeros(self._owner.num_rows, heads, self._owner.num_slots, width)
        larger[:rows, :, :slots] = store
        return larger

    def _zeros(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, width = states.shape
        return states.new_zeros(self._owner.num_rows, heads, self._owner.num_slots, width)


def _decode(
    store: torch.Tensor, states: torch.Tensor, plan: Decode, places: torch.Tensor
) -> torch.Tensor:
    width = store.shape[-1]
    store.view(-1, width).index_copy_(0, places, states.reshape(-1, width))
    return store[: plan.rows, :, : plan.window]


def _prefill(store: torch.Tensor, states: torch.Tensor, plan: Prefill) -> None:
    count, length = plan.source.shape
    rows = states.transpose(1, 2)[plan.prompt, plan.source]
    store[plan.first : plan.first + count, :, :length] = rows.transpose(1, 2)
