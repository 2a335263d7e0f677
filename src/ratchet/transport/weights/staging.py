"""Staging buffers: the memory of one end, beside the model, that buckets pass through.

Consumes sizes, produces buffers, kept from transfer to transfer, as fresh memory is slow. An engine
may take those of a whole model for its parameters; the ones that it had before are then free for
the next transfer. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

NUM_STAGING: Final = 2
"""Buckets that an end holds at once, at least."""


def staging_sizes(bucket_bytes: Sequence[int], limit_bytes: int) -> tuple[int, ...]:
    """Return the sizes of an engine's buffers: one for each bucket where all of them together are
    within the limit, else as many of the largest as are, used in turns.
    """
    if len(bucket_bytes) <= NUM_STAGING or sum(bucket_bytes) <= limit_bytes:
        return tuple(bucket_bytes)
    largest = max(bucket_bytes)
    return (largest,) * min(max(NUM_STAGING, limit_bytes // largest), len(bucket_bytes) - 1)


class Staging:
    """The buffers of one end; of one thread, but for what says otherwise."""

    def __init__(self) -> None:
        self._held: list[torch.Tensor] = []
        self._left: list[torch.Tensor] = []
        """what an engine holds, until it takes others"""

    def buffers(self, sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Return uint8 buffers on this device, one of at least each size."""
        held = self._held
        fits = len(held) == len(sizes) and all(
            len(buffer) >= size and buffer.device == device
            for buffer, size in zip(held, sizes, strict=True)
        )
        if not fits:
            del held
            self._held = []  # the old ones first: never both
            self._held += [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
        return self._held

    def hand_over(self) -> Callable[[], None]:
        """Part with the buffers: an engine is about to take them. On the engine's loop, while the
        thread has nothing to do with them.

        Returns:
            What to call when it has. The buffers that it had until then come back for the next
            transfer. Until then nobody knows which it holds, and neither are used again.
        """
        leaving, coming = self._held, self._left
        self._held, self._left = [], []

        def done() -> None:
            self._held, self._left = coming, leaving

        return done

    def free(self) -> None:
        """Give the memory up; what an engine holds is its own."""
        self._held, self._left = [], []
