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
from ratchet.transport.mailbox.shared import Array, is_lasting
from ratchet.types import Packed, Rollout, RolloutGroup

ARRAY_BYTES: Final = 32 << 10
"""An array of this size travels beside its message; a smaller one is copied with it."""

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


def _has_large(message: Message) -> bool:
    return any(
        max(map(len, _data_of_rollout(rollout))) >= ARRAY_BYTES
        for group in _groups(message)
        for rollout in group.rollouts
    )


def _is_large(array: Packed) -> bool:
    # what could change while it waits is copied at once
    return len(array.data) >= ARRAY_BYTES and is_lasting(array.data)


def take_out(message: Message) -> tuple[Message, tuple[int, ...], tuple[Array, ...]]:
    """Return the message without its large arrays, their places among all its arrays, and them."""
    if not _has_large(message):
        return message, (), ()
    arrays = _arrays(message)
    slots = tuple(slot for slot, array in enumerate(arrays) if _is_large(array))
    return _lighten(message), slots, tuple(arrays[slot].data for slot in slots)


def _lighten(message: Message) -> Message:
    if isinstance(message, GroupFinished):
        return replace(message, group=_lighten_group(message.group))
    if isinstance(message, BatchReady):
        groups = tuple(map(_lighten_group, message.batch.groups))
        return replace(message, batch=replace(message.batch, groups=groups))
    return message


def _lighten_group(group: RolloutGroup) -> RolloutGroup:
    return replace(group, rollouts=tuple(map(_lighten_rollout, group.rollouts)))


def _lighten_rollout(rollout: Rollout) -> Rollout:
    large = {
        name: Packed(array.dtype, b"")
        for name, array in zip(_NAMES, _of_rollout(rollout), strict=True)
        if _is_large(array)
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
