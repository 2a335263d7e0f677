from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.transport.mailbox.depth import within_depth


def depth(value: Any) -> int:
    if isinstance(value, list):
        return 1 + max(map(depth, value), default=0) if value else 0
    if isinstance(value, dict):
        return 1 + max(map(depth, value.values()), default=0) if value else 0
    return 0


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=70)
    | st.binary(max_size=70)
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner),
    max_leaves=20,
)


@settings(max_examples=50, deadline=None)
@given(values)
def test_the_walk_finds_the_depth(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    assert within_depth(data, depth(value))
    if depth(value):
        assert not within_depth(data, depth(value) - 1)


@given(st.binary(max_size=200))
def test_the_walk_ends_on_any_bytes(data: bytes) -> None:
    within_depth(data, 16)


@pytest.mark.parametrize(
    "value", [msgspec.msgpack.Ext(1, b"x" * n) for n in (1, 2, 5, 300, 70_000)]
)
def test_extensions_are_skipped_whole(value: msgspec.msgpack.Ext) -> None:
    data = msgspec.msgpack.encode([value, [[1]]])
    assert within_depth(data, 3)
    assert not within_depth(data, 2)


def test_wide_containers_are_not_deep() -> None:
    assert within_depth(msgspec.msgpack.encode([[0] * 70_000, {str(i): i for i in range(100)}]), 2)
