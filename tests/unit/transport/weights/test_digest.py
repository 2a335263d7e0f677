"""Digests: defined by the values alone, different for every single bit, checked by name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratchet.errors import WeightsMismatch
from ratchet.transport.weights.base import TensorSpec
from ratchet.transport.weights.digest import (
    bucket_digest,
    check_trailer,
    digest_as_it_comes,
    digest_of,
    digests_of,
    make_trailer,
    trailer_bytes,
    whole_digest,
)
from ratchet.transport.weights.plan import make_manifest
from ratchet.types import WeightManifest

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A loaded machine is no fault of the code."""


def manifest_of(*sizes: int, bucket_bytes: int = 128, version: int = 7) -> WeightManifest:
    specs = [TensorSpec(f"p{n}", "uint8", (size,)) for n, size in enumerate(sizes)]
    return make_manifest(specs, bucket_bytes, term=2, version=version, step=1)


def test_known_values() -> None:
    """The definition is part of the protocol: both ends may be of different releases."""
    assert digest_of(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert digest_of(b"ratchet") == xxhash.xxh3_128(b"ratchet").digest()
    assert whole_digest([b"\0" * 16, b"\1" * 16]) == xxhash.xxh3_128_hexdigest(
        b"\0" * 16 + b"\1" * 16
    )


def test_the_digest_of_a_bucket_is_over_those_of_its_parameters() -> None:
    digests = digests_of([b"", b"ratchet", memoryview(b"a")])
    assert digests == (digest_of(b""), digest_of(b"ratchet"), digest_of(b"a"))
    assert bucket_digest(digests) == xxhash.xxh3_128_digest(b"".join(digests))
    assert bucket_digest(digests) != bucket_digest(digests[::-1])


@unhurried
@given(st.lists(st.integers(0, 200), min_size=1, max_size=6), st.data())
def test_a_bucket_is_read_as_it_comes(sizes: list[int], data: st.DataObject) -> None:
    plan = manifest_of(*sizes, bucket_bytes=10**6)
    (num_bytes,) = plan.bucket_bytes
    content = bytes(range(256)) * (num_bytes // 256 + 1)
    bucket = bytearray(num_bytes)
    ends = sorted(data.draw(st.lists(st.integers(0, num_bytes), max_size=5)))
    last = 0

    def come() -> Iterator[int]:
        nonlocal last
        for end in (*ends, num_bytes):
            bucket[last:end] = content[last:end]
            last = end
            yield end

    found = digest_as_it_comes(memoryview(bucket), plan.slots, come())
    assert found == tuple(
        digest_of(content[slot.offset : slot.offset + slot.num_bytes]) for slot in plan.slots
    )
    assert last == num_bytes, "what nobody reads is waited for as well"


@unhurried
@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_single_bit_changes_the_digest(value: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    changed = bytearray(value)
    changed[bit // 8] ^= 1 << bit % 8
    assert digest_of(bytes(changed)) != digest_of(value)


def test_the_order_of_buckets_counts() -> None:
    a, b = digest_of(b"a"), digest_of(b"b")
    assert whole_digest([a, b]) != whole_digest([b, a])


def test_a_trailer_that_fits() -> None:
    manifest = manifest_of(100, 100, 100)
    digests = [digest_of(bytes([n])) for n in range(3)]
    trailer = make_trailer(manifest, digests)
    assert len(trailer) == trailer_bytes(manifest)
    check_trailer(manifest, trailer, digests)


def test_a_damaged_bucket_is_named() -> None:
    manifest = manifest_of(100, 30, 30, 100)
    digests = [digest_of(bytes([n])) for n in range(3)]
    trailer = make_trailer(manifest, digests)
    digests[1] = digest_of(b"x")
    with pytest.raises(WeightsMismatch, match=r"bucket 1 of 3 \(p1 \.\.\. p2\) of version 7"):
        check_trailer(manifest, trailer, digests)


def test_every_bit_of_a_trailer_counts() -> None:
    manifest = manifest_of(100, 100)
    digests = [digest_of(b"a"), digest_of(b"b")]
    trailer = make_trailer(manifest, digests)
    for position in range(8 * len(trailer)):
        changed = bytearray(trailer)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(WeightsMismatch):
            check_trailer(manifest, bytes(changed), digests)


def test_the_trailer_of_another_version_is_refused() -> None:
    digests = [digest_of(b"a")]
    old = make_trailer(manifest_of(100, version=6), digests)
    with pytest.raises(WeightsMismatch, match="version 7 of term 2 was announced, and version 6"):
        check_trailer(manifest_of(100), old, digests)
