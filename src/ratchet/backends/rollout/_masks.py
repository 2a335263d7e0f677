"""Attention masks for rows of different lengths in one decode step.

Consumes a model's config and the rows' positions, produces an additive mask in the form that its
layers take; pure. Prefills need none of this: transformers makes their masks. Shapes: n rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Masks = torch.Tensor | dict[str, torch.Tensor]


class MaskBuilder:
    """Masks for full attention, sliding windows, and models that mix both.

    Raises:
        ValueError: if a layer of the model attends in another way.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        window = getattr(config, "sliding_window", None)
        kinds = getattr(config, "layer_types", None)
        if kinds is None:
            kinds = ["full_attention" if window is None else "sliding_attention"]
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            msg = f"layers of type {', '.join(sorted(unknown))} keep another state than a cache"
            raise ValueError(msg)
        self._windows = {
            kind: window if kind == "sliding_attention" else None for kind in sorted(set(kinds))
        }
        self._dtype: torch.dtype = model.dtype

    def decode(self, positions: torch.Tensor, window: int) -> Masks:
        """Let each row see the slots up to its own.

        Args:
            positions: int64 [n, 1], the slot of each row's newest token.
            window: slots that the attention is given.

        Returns:
            one mask [n, 1, 1, window], or one for each kind of layer.
        """
        slots = torch.arange(window, device=positions.device)
        masks = {
            kind: self._additive(positions, slots, sliding)
            for kind, sliding in self._windows.items()
        }
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _additive(
        self, positions: torch.Tensor, slots: torch.Tensor, sliding: int | None
    ) -> torch.Tensor:
        hidden = slots > positions
        if sliding is not None:
            hidden |= slots <= positions - sliding
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=positions.device)
        return mask.masked_fill_(hidden, torch.finfo(self._dtype).min)[:, None, None]
