"""Large arrays travel beside their message: neither end copies or decodes it all in one go. Pure.

Consumes messages, produces the same messages without their large arrays, and those arrays; and puts
them together again at the other end. Waits for nothing. To copy 64 MiB at once holds an event loop
for tens of milliseconds, most of it in page faults; arrays taken out are sent as they lie in memory
and received piece by piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def take_out(message: Message) -> tuple[Message, tuple[int, ...], tuple[Array, ...]]:
    """Return the message without its large arrays, their places among all its arrays, and them."""
    if _largest(message) < LEAST_BYTES:
        return message, (), ()
    arrays = _arrays(message)
    sizes = [len(array.data) for array in arrays]
    least = LEAST_BYTES if sum(sizes) >= SHARED_BYTES else ARRAY_BYTES
    # what could change while it waits is copied at once
    slots = tuple(
        slot for slot, size in enumerate(sizes) if size >= least and is_lasting(arrays[slot].data)
    )
    if not slots:
        return message, (), ()
    taken = tuple(arrays[slot].data for slot in slots)
    for slot in slots:
        arrays[slot] = Packed(arrays[slot].dtype, b"")
    return _with(message, iter(arrays)), slots, taken


def _with(message: Message, arrays: Iterator[Packed]) -> Message:
    """Return the message with these arrays in the place of its own."""
    if isinstance(message, GroupFinished):
        return replace(message, group=_group_with(message.group, arrays))
    if isinstance(message, BatchReady):
        groups = tuple(_group_with(group, arrays) for group in message.batch.groups)
        return replace(message, batch=replace(message.batch, groups=groups))
    return message


def _group_with(group: RolloutGroup, arrays: Iterator[Packed]) -> RolloutGroup:
    # zip asks for the name first, and so takes as many arrays as there are names
    rollouts = tuple(
        replace(rollout, **dict(zip(_NAMES, arrays, strict=False))) for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts)


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
