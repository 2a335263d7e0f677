"""The plan of a transfer: which bytes of which bucket hold which parameter. Pure, without torch.

Consumes the parameters that the trainer describes, produces the manifest that both ends follow.
Waits for nothing. Everything here is a function of its arguments, so that both ends, every
transport and the verification agree on one layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ratchet.errors import WeightsMismatch
from ratchet.transport.weights.base import TensorSpec
from ratchet.types import PolicyVersion, TensorSlot, Term, WeightManifest

ALIGNMENT: Final = 64
"""Every offset and bucket size is a multiple: a cache line, and more than any dtype needs."""

ITEM_BYTES: Final[Mapping[str, int]] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}
_NAMED = 5
"""Names that an error lists before it only counts."""


def make_manifest(
    specs: Sequence[TensorSpec],
    bucket_bytes: int,
    *,
    term: Term,
    version: PolicyVersion,
    step: int,
) -> WeightManifest:
    """Plan one transfer: parameters in the order of `specs`, packed into buckets one after another.

    Args:
        specs: every parameter of the trainer. Tied ones travel once, under the name they point to.
        bucket_bytes: size that a bucket is filled up to. A larger tensor gets a bucket of its own.
        term: the trainer's term.
        version: the policy version that travels.
        step: the optimiser step of that version.

    Raises:
        ValueError: if there is nothing to send, a name comes twice, a dtype is unknown, or an alias
            does not point to a parameter of the same shape and dtype that travels.
    """
    aliases = _aliases(specs)
    slots: list[TensorSlot] = []
    sizes: list[int] = []
    for spec in specs:
        if spec.alias_of is not None:
            continue
        num_bytes = tensor_bytes(spec)
        if not sizes or (sizes[-1] and sizes[-1] + num_bytes > bucket_bytes):
            sizes.append(0)
        slots.append(
            TensorSlot(
                name=spec.name,
                dtype=spec.dtype,
                shape=tuple(spec.shape),
                bucket=len(sizes) - 1,
                offset=sizes[-1],
                num_bytes=num_bytes,
            )
        )
        sizes[-1] = align(sizes[-1] + num_bytes)
    if not slots:
        msg = "the trainer describes no parameter, so there is nothing to send"
        raise ValueError(msg)
    return WeightManifest(
        term=term,
        version=version,
        step=step,
        slots=tuple(slots),
        # a bucket of nothing but empty tensors still moves some bytes: no transport likes none
        bucket_bytes=tuple(max(size, ALIGNMENT) for size in sizes),
        aliases=aliases,
    )


def tensor_bytes(spec: TensorSpec | TensorSlot) -> int:
    """Return the size of a parameter in bytes.

    Raises:
        ValueError: if the dtype is unknown.
    """
    if spec.dtype not in ITEM_BYTES:
        msg = f"{spec.name} has dtype {spec.dtype!r}; known: {', '.join(ITEM_BYTES)}"
        raise ValueError(msg)
    return math.prod(spec.shape) * ITEM_BYTES[spec.dtype]


def align(size: int) -> int:
    """Return where the next slot can begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def slots_by_bucket(manifest: WeightManifest) -> tuple[tuple[TensorSlot, ...], ...]:
    """Return the slots of each bucket, by offset."""
    buckets: list[list[TensorSlot]] = [[] for _ in manifest.bucket_bytes]
    for slot in manifest.slots:
        buckets[slot.bucket].append(slot)
    return tuple(tuple(sorted(slots, key=lambda slot: slot.offset)) for slots in buckets)


def check_specs(
    manifest: WeightManifest, sink_specs: Sequence[TensorSpec]
) -> Mapping[str, tuple[str, ...]]:
    """Check that an engine can take a transfer, all of it and nothing else.

    Either end may tie parameters that the other keeps apart, as long as the engine does not tie
    what the trainer trains separately.

    Returns:
        For each name that travels, the engine's own (untied) parameters that take its values.

    Raises:
        WeightsMismatch: if parameters are missing, unknown, of another shape or dtype, or tied only
            at the engine; or if the manifest contradicts itself. The text names them.
    """
    _check_layout(manifest)
    slots = {slot.name: slot for slot in manifest.slots}
    sent = {name: slots[manifest.aliases.get(name, name)] for name in (*slots, *manifest.aliases)}
    wanted = {spec.name: spec for spec in sink_specs}
    problems = [
        _listed("missing from the transfer", (name for name in wanted if name not in sent)),
        _listed("unknown to the engine", (name for name in sent if name not in wanted)),
        _listed("different", _differences(sent, wanted)),
        _listed("tied at the engine, separate at the trainer", _split_ties(sent, wanted)),
    ]
    if any(problems):
        raise WeightsMismatch("; ".join(filter(None, problems)))
    owners: dict[str, tuple[str, ...]] = dict.fromkeys(slots, ())
    for spec in sink_specs:
        if spec.alias_of is None:
            owners[sent[spec.name].name] += (spec.name,)
    return owners


def _aliases(specs: Sequence[TensorSpec]) -> dict[str, str]:
    known = {spec.name: spec for spec in specs}
    if len(known) != len(specs):
        names = [spec.name for spec in specs]
        msg = _listed("described twice", (name for name in known if names.count(name) > 1))
        raise ValueError(msg)
    aliases: dict[str, str] = {}
    for spec in specs:
        if spec.alias_of is None:
            continue
        target = known.get(spec.alias_of)
        if target is None or target.alias_of is not None:
            msg = f"{spec.name} is tied to {spec.alias_of}, which is not a parameter that travels"
            raise ValueError(msg)
        if (spec.dtype, tuple(spec.shape)) != (target.dtype, tuple(target.shape)):
            msg = f"{spec.name} is tied to {target.name}, and has another shape or dtype"
            raise ValueError(msg)
        aliases[spec.name] = target.name
    return aliases


def _check_layout(manifest: WeightManifest) -> None:
    """Refuse a manifest whose slots overlap, leave their bucket, or are not what they say."""
    names = {slot.name for slot in manifest.slots}
    if set(range(len(manifest.bucket_bytes))) != {slot.bucket for slot in manifest.slots}:
        msg = "the manifest has a bucket without a parameter, or none at all"
        raise WeightsMismatch(msg)
    if len(names) != len(manifest.slots) or not names.issuperset(manifest.aliases.values()):
        msg = "the manifest names a parameter twice, or ties one to another that does not travel"
        raise WeightsMismatch(msg)
    ends = [0] * len(manifest.bucket_bytes)
    for slot in sorted(manifest.slots, key=lambda slot: slot.offset):
        fits = (
            slot.dtype in ITEM_BYTES
            and all(size >= 0 for size in slot.shape)
            and slot.num_bytes == tensor_bytes(slot)
            and slot.offset % ALIGNMENT == 0
            and ends[slot.bucket] <= slot.offset
            and slot.offset + slot.num_bytes <= manifest.bucket_bytes[slot.bucket]
        )
        if not fits:
            msg = f"the manifest's slot of {slot.name} does not fit its bucket, shape or dtype"
            raise WeightsMismatch(msg)
        ends[slot.bucket] = slot.offset + slot.num_bytes


def _differences(sent: Mapping[str, TensorSlot], wanted: Mapping[str, TensorSpec]) -> Iterable[str]:
    for name, spec in wanted.items():
        slot = sent.get(name)
        if slot is None:
            continue
        ours, theirs = (spec.dtype, tuple(spec.shape)), (slot.dtype, slot.shape)
        if ours != theirs:
            yield f"{name} is {_told(*theirs)} at the trainer, {_told(*ours)} at the engine"


def _split_ties(sent: Mapping[str, TensorSlot], wanted: Mapping[str, TensorSpec]) -> Iterable[str]:
    for name, spec in wanted.items():
        if spec.alias_of is None or name not in sent or spec.alias_of not in sent:
            continue
        if sent[name] is not sent[spec.alias_of]:
            yield f"{name} and {spec.alias_of}"


def _told(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}{list(shape)}"


def _listed(what: str, items: Iterable[str]) -> str:
    """Return "what (count): a, b, ..." or nothing where there are no items."""
    found = list(items)
    if not found:
        return ""
    more = ", ..." if len(found) > _NAMED else ""
    return f"{what} ({len(found)}): {', '.join(found[:_NAMED])}{more}"
