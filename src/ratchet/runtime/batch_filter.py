"""`buffer.batch_filter`: code of the user's own that looks at the batch before it is trained.

Consumes the groups of a batch, produces a mark for each of their rollouts; waits for the user's
function, which runs on a thread, so that the trainer goes on answering meanwhile.

The contract, of `function(groups)`:

* It is called once per optimiser step, in the process of the trainer (rank 0 alone: the marks
  reach the other ranks as loss masks), with the groups that are within `buffer.max_staleness` for
  the weights that take the step. Where tokens were masked, `loss_mask` is 0 already.
* It returns a list for each group, with a bool for each of its `rollouts`: True where the rollout
  is not to be trained. Tuples and numpy arrays do as well. It must not change the groups.
* A marked rollout is out of the loss, the statistics of the advantages and the number of tokens.
  The batch keeps its groups and is not filled up. A group of which nothing is left counts as
  dropped, with the reason "filter:batch"; a batch of which nothing is left is a step skipped.
* What it raises, and any other answer, fails the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from ratchet.actors.filters import call_own, load_function
from ratchet.config import BufferConfig
from ratchet.errors import RunFailed
from ratchet.types import RolloutGroup

_FIELD = "buffer.batch_filter"


def open_batch_filter(config: BufferConfig) -> ThreadBatchFilter | None:
    """Return the filter that a configuration names; raises as `load_batch_filter`."""
    function = load_batch_filter(config)
    return function and ThreadBatchFilter(str(config.batch_filter), function)


def load_batch_filter(config: BufferConfig) -> Callable[..., object] | None:
    """Return the function that a configuration names.

    Raises:
        ConfigError: if it does not import, or cannot be called with the groups alone.
    """
    if config.batch_filter is None:
        return None
    returns = "for each group a list of bools, True for a rollout that is not to be trained"
    return load_function(_FIELD, config.batch_filter, "groups: Sequence[RolloutGroup]", returns)


class ThreadBatchFilter:
    """A `BatchFilter` that calls a function on a thread of its own."""

    def __init__(self, name: str, function: Callable[..., object]) -> None:
        self._name = name
        self._function = function
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-filter")

    async def marks(self, groups: Sequence[RolloutGroup]) -> tuple[tuple[bool, ...], ...]:
        """Return a mark per rollout.

        Raises:
            RunFailed: if the function raises, or returns something else; the text names it.
        """
        loop = asyncio.get_running_loop()
        answer = await loop.run_in_executor(
            self._thread, call_own, _FIELD, self._name, self._function, groups
        )
        return check_marks(self._name, groups, answer)

    def close(self) -> None:
        """Wait for nothing: a call in flight goes on, and its answer goes nowhere."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def check_marks(
    name: str, groups: Sequence[RolloutGroup], answer: object
) -> tuple[tuple[bool, ...], ...]:
    """Return what a batch filter answered, if it is one mark per sample.

    Args:
        name: of the filter, as it is configured.
        groups: that it was given.
        answer: any sequence of sequences of bools, numpy arrays included.

    Raises:
        RunFailed: if it is something else; the text names the filter.
    """
    import numpy as np  # not before it is needed: what checks a configuration stays light

    sizes = [len(group.rollouts) for group in groups]
    try:
        marks = [list(part) for part in answer]  # type: ignore[attr-defined]
    except TypeError:
        marks = None
    if marks is None or not all(isinstance(m, bool | np.bool_) for part in marks for m in part):
        found = f"{type(answer).__name__} {answer!r:.80}"
    elif [len(part) for part in marks] != sizes:
        found = f"marks for {[len(part) for part in marks]} samples"
    else:
        return tuple(tuple(map(bool, part)) for part in marks)
    msg = (
        f"buffer.batch_filter = {name!r} returned {found}; it takes the groups of the batch and"
        f" returns a list of bools for each of them, one per rollout (here {sizes}): True where"
        " the sample is not to be trained"
    )
    raise RunFailed(msg)
