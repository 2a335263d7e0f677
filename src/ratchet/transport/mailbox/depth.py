"""How deep a msgpack value nests, found without building it, and which types need that. Pure.

Consumes bytes and types; waits for nothing.
"""

from __future__ import annotations

from typing import Final

import msgspec.inspect

# kind of a msgpack value by its first byte: (bytes to skip, bytes of the length field, items per
# unit of length); fixed containers and strings are told from the byte itself
_SCALAR_BYTES: Final = {
    0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
    0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17,
}  # fmt: skip
_BLOB_LENGTH_BYTES: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_EXT_LENGTH_BYTES: Final = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_CONTAINERS: Final = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def within_depth(data: bytes, limit: int) -> bool:
    """Walk over one msgpack value without building it; tell whether it nests at most `limit` deep.

    A value that is cut short is left to the decoder, which refuses it.
    """
    open_items = [1]
    at = 0
    while open_items:
        if open_items[-1] == 0:
            open_items.pop()
            continue
        if at >= len(data):
            return True
        open_items[-1] -= 1
        at, num_items = _step(data, at)
        if num_items:
            if len(open_items) > limit:
                return False
            open_items.append(num_items)
    return True


def _step(data: bytes, at: int) -> tuple[int, int]:
    """Return where the value at `at` ends, or its first item starts, and how many items follow."""
    first = data[at]
    at += 1
    if first <= 0x7F or first >= 0xE0:
        return at, 0
    if first <= 0x8F:
        return at, 2 * (first & 0x0F)
    if first <= 0x9F:
        return at, first & 0x0F
    if first <= 0xBF:
        return at + (first & 0x1F), 0
    if (width := _BLOB_LENGTH_BYTES.get(first)) is not None:
        return at + width + int.from_bytes(data[at : at + width], "big"), 0
    if (container := _CONTAINERS.get(first)) is not None:
        width, per_unit = container
        return at + width, per_unit * int.from_bytes(data[at : at + width], "big")
    if (width := _EXT_LENGTH_BYTES.get(first)) is not None:
        return at + width + 1 + int.from_bytes(data[at : at + width], "big"), 0
    return at + _SCALAR_BYTES.get(first, 0), 0


def is_free_form(kind: msgspec.inspect.Type) -> bool:
    """Tell whether a type leaves the form of a value open somewhere, and with it the nesting."""
    if isinstance(kind, msgspec.inspect.AnyType):
        return True
    inner: list[msgspec.inspect.Type] = []
    if isinstance(kind, msgspec.inspect.StructType):
        inner = [field.type for field in kind.fields]
    elif isinstance(kind, msgspec.inspect.UnionType):
        inner = list(kind.types)
    elif isinstance(kind, msgspec.inspect.DictType):
        inner = [kind.key_type, kind.value_type]
    elif isinstance(kind, msgspec.inspect.TupleType):
        inner = list(kind.item_types)
    elif isinstance(kind, msgspec.inspect.CollectionType):
        inner = [kind.item_type]
    return any(is_free_form(each) for each in inner)
