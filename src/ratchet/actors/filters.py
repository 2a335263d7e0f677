"""The dynamic filters: whether a finished group is worth training.

Consumes a finished `RolloutGroup`, produces True to keep it; pure, and waits for nothing. Each
judges all rollouts of the group, however many samples a trajectory has: one is enough for a length,
a truncation or an abort to reject the group. What was aborted has neither a length nor a reward.

A filter of the user's own is "module:function", called in the buffer's process as
`function(group: RolloutGroup) -> bool`. The buffer does nothing else meanwhile: it must be quick,
and read no network; a slow one is named in the log (`Watch`). What raises there, or returns
anything but a bool, fails the run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeAlias, cast, get_args

import msgspec

from ratchet.config import BufferConfig, FilterName
from ratchet.errors import ConfigError, RunFailed
from ratchet.imports import import_for
from ratchet.types import Packed, Rollout, RolloutGroup

Filter: TypeAlias = Callable[[RolloutGroup], bool]
Watch: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""What sees to it that somebody hears of code of the user's own that holds the buffer up."""

_ABORTED: Final = {"abort": "aborted", "error": "generation"}
"""Finish reasons without a reward that means anything -> why the group is unused."""


def unwatched(name: str) -> AbstractContextManager[None]:
    """Watch nothing."""
    del name
    return nullcontext()


def load_filters(config: BufferConfig, watch: Watch = unwatched) -> tuple[tuple[str, Filter], ...]:
    """Return (name, filter) in the order of `buffer.filters`.

    Raises:
        ConfigError: if one does not import, or cannot be called with a group.
    """
    known = get_args(FilterName)
    return tuple(
        (name, _builtin(cast("FilterName", name), config) if name in known else _own(name, watch))
        for name in config.filters
    )


def load_function(field: str, reference: str, takes: str, returns: str) -> Callable[..., object]:
    """Import a function of one argument that a field of the configuration names.

    Raises:
        ConfigError: if it does not import, or cannot be called with one argument.
    """
    found = import_for(field, reference)
    if not callable(found):
        msg = f"{field}: {reference!r} is {found!r}, not a function ({takes}) -> {returns}"
        raise ConfigError(msg)
    try:
        signature = inspect.signature(found)
    except ValueError:  # of some built-ins there is none; a call will tell
        return found
    try:
        signature.bind(None)
    except TypeError as error:
        msg = (
            f"{field}: {reference!r} takes {signature}: {error}; it is called with one argument,"
            f" ({takes}), and returns {returns}"
        )
        raise ConfigError(msg) from None
    return found


def call_own(field: str, reference: str, function: Callable[..., object], value: object) -> object:
    """Call a function of the user's own.

    Raises:
        RunFailed: if it raises; the text names it.
    """
    try:
        return function(value)
    except Exception as error:
        msg = f"{field}: {reference!r} raised {type(error).__name__}: {error}"
        raise RunFailed(msg) from error


def why_aborted(group: RolloutGroup) -> str | None:
    """Return "aborted" or "generation" if a rollout has no end of its own, or None."""
    reasons = {_ABORTED[r.finish_reason] for r in group.rollouts if r.finish_reason in _ABORTED}
    return min(reasons, default=None)


def whole_rewards(group: RolloutGroup) -> list[float]:
    """Return the reward of each trajectory that came to its end: that of another one is none."""
    if why_aborted(group) is None:
        return list(group.rewards)
    return [samples[0].reward for samples in group.trajectories if _is_whole(samples)]


def mask_aborted(group: RolloutGroup) -> RolloutGroup:
    """Return the group with nothing trained of a trajectory that did not come to its end.

    It keeps its size: the group is not torn.
    """
    broken = {
        id(rollout)
        for samples in group.trajectories
        if not _is_whole(samples)
        for rollout in samples
    }

    def masked(rollout: Rollout) -> Rollout:
        if id(rollout) not in broken:
            return rollout
        none = Packed("uint8", bytes(len(rollout.loss_mask)))
        return msgspec.structs.replace(rollout, loss_mask=none)

    return msgspec.structs.replace(group, rollouts=tuple(map(masked, group.rollouts)))


def _is_whole(samples: Iterable[Rollout]) -> bool:
    return all(sample.finish_reason not in _ABORTED for sample in samples)


def _builtin(name: FilterName, config: BufferConfig) -> Filter:
    least, most = config.min_tokens or 0, config.max_tokens or 0
    match name:
        case "zero_spread":
            return lambda group: len(set(whole_rewards(group))) > 1
        case "too_short":
            return lambda group: all(length >= least for length in _lengths(group))
        case "too_long":
            return lambda group: all(length <= most for length in _lengths(group))
        case "truncated":
            return lambda group: all(r.finish_reason != "length" for r in group.rollouts)
        case "any_aborted":
            return lambda group: _is_whole(group.rollouts)


def _lengths(group: RolloutGroup) -> list[int]:
    """Return the tokens that the policy made of each rollout: an environment's are not its."""
    return [r.loss_mask.count_ones() for r in group.rollouts if _is_whole([r])]


def _own(reference: str, watch: Watch) -> Filter:
    field = "buffer.filters"
    function = load_function(field, reference, "group: RolloutGroup", "a bool, True to keep it")

    def keeps(group: RolloutGroup) -> bool:
        with watch(f"{field}: {reference}"):
            answer = call_own(field, reference, function, group)
        if isinstance(answer, bool):
            return answer
        import numpy as np  # not before it is needed: what checks a configuration stays light

        if isinstance(answer, np.bool_):  # what comparing means of rewards gives
            return bool(answer)
        msg = f"{field}: {reference!r} returned {answer!r}, not True (keep the group) or False"
        raise RunFailed(msg)

    return keeps
