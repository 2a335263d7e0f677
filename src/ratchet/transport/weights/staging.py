"""Staging buffers: the memory of one end, beside the model, that buckets pass through.

Consumes sizes, produces two buffers, kept from transfer to transfer, as fresh memory is slow. Waits
for nothing.
"""

from __future__ import annotations

import torch

from ratchet.transport.weights.finalize import NUM_STAGING


class Staging:
    """The two buffers of one end; of one thread."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []

    def buffers(self, num_bytes: int, device: torch.device) -> list[torch.Tensor]:
        """Return uint8 buffers on this device, each of at least `num_bytes`."""
        held = self._held
        if not held or len(held[0]) < num_bytes or held[0].device != device:
            held = self._held = []  # the old ones first: never four
            held += [
                torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_STAGING)
            ]
        return held

    def free(self) -> None:
        """Give the memory up."""
        self._held = []
