"""Large arrays travel beside their message: neither end copies or decodes it all in one go. Pure.

Consumes messages, produces the same messages without their large arrays, and those arrays; and puts
them together again at the other end. Waits for nothing. To copy 64 MiB at once holds an event loop
for tens of milliseconds, most of it in page faults; arrays taken out are sent as they lie in memory
and received piece by piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Final

from msgspec.structs import fields, force_setattr, replace

from ratchet.messages import BatchReady, GroupFinished, Message
from ratchet.transport.mailbox.shared import SHARED_BYTES, Array, is_lasting
from ratchet.types import Packed, Rollout, RolloutGroup

ARRAY_BYTES: Final = 32 << 10
"""An array of this size travels beside its message; a smaller one is copied with it."""
LEAST_BYTES: Final = 8 << 10
"""So does one of this size, if those of its message can be shared: they need not be long."""

_NAMES: Final = tuple(field.name for field in fields(Rollout) if field.type is Packed)
_of_rollout: Final = attrgetter(*_NAMES)
_data_of_rollout: Final = attrgetter(*[f"{name}.data" for name in _NAMES])


def _groups(message: Message) -> tuple[RolloutGroup, ...]:
    """Return what holds the arrays of a message; other messages have none."""
    if isinstance(message, GroupFinished):
        return (message.group,)
    return message.batch.groups if isinstance(message, BatchReady) else ()


def _arrays(message: Message) -> list[Packed]:
    return [
        array
        for group in _groups(message)
        for rollout in group.rollouts
        for array in _of_rollout(rollout)
    ]


def _largest(message: Message) -> int:
    return max(
        (
            max(map(len, _data_of_rollout(rollout)))
            for group in _groups(message)
            for rollout in group.rollouts
        ),
        default=0,
    )


def _leaves(array: Packed, least: int) -> bool:
    # what could change while it waits is copied at once
    return len(array.data) >= least and is_lasting(array.data)


def take_out(message: Message) -> tuple[Message, tuple[int, ...], tuple[Array, ...]]:
    """Return the message without its large arrays, their places among all its arrays, and them."""
    if _largest(message) < LEAST_BYTES:
        return message, (), ()
    arrays = _arrays(message)
    total = sum(len(array.data) for array in arrays)
    least = LEAST_BYTES if total >= SHARED_BYTES else ARRAY_BYTES
    slots = tuple(slot for slot, array in enumerate(arrays) if _leaves(array, least))
    if not slots:
        return message, (), ()
    return _lighten(message, least), slots, tuple(arrays[slot].data for slot in slots)


def _lighten(message: Message, least: int) -> Message:
    if isinstance(message, GroupFinished):
        return replace(message, group=_lighten_group(message.group, least))
    if isinstance(message, BatchReady):
        groups = tuple(_lighten_group(group, least) for group in message.batch.groups)
        return replace(message, batch=replace(message.batch, groups=groups))
    return message


def _lighten_group(group: RolloutGroup, least: int) -> RolloutGroup:
    rollouts = tuple(_lighten_rollout(rollout, least) for rollout in group.rollouts)
    return replace(group, rollouts=rollouts)


def _lighten_rollout(rollout: Rollout, least: int) -> Rollout:
    large = {
        name: Packed(array.dtype, b"")
        for name, array in zip(_NAMES, _of_rollout(rollout), strict=True)
        if _leaves(array, least)
    }
    return replace(rollout, **large) if large else rollout


def put_in(message: Message, slots: Sequence[int], arrays: Sequence[Array]) -> None:
    """Complete a message that has just been decoded and that nobody else has seen.

    Raises:
        ValueError: the arrays are not those that were taken out.
    """
    places = _arrays(message)
    if len(slots) != len(arrays):
        raise ValueError(f"{len(slots)} arrays were announced and {len(arrays)} came")
    for slot, data in zip(slots, arrays, strict=True):
        if not 0 <= slot < len(places) or places[slot].data:
            raise ValueError(f"there is no place {slot} for an array")
        force_setattr(places[slot], "data", data)
