"""Digests of what travels: xxh3-128 for each parameter, each bucket and all of them. Pure.

Consumes bytes, produces digests and the trailer that carries them behind the buckets. Waits for
nothing. xxh3 finds faults, not forgers: who may connect is the store's and the mailboxes' matter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final

import xxhash

from ratchet.errors import WeightsMismatch
from ratchet.types import TensorSlot, WeightManifest

DIGEST_BYTES: Final = 16
_HEADER: Final = struct.Struct("<qq")
"""term, version: bytes that a broken group kept from an earlier transfer must not pass."""


def digest_of(data: bytes | memoryview) -> bytes:
    """Return the digest of one contiguous piece; releases the GIL."""
    return xxhash.xxh3_128_digest(data)


def digest_as_it_comes(
    data: memoryview, slots: Sequence[TensorSlot], ends: Iterable[int]
) -> tuple[bytes, ...]:
    """Return the digest of each parameter of a bucket that is still arriving. What has come is read
    at once: it is in the cache, and the next piece travels meanwhile.

    Args:
        data: the bucket's memory.
        slots: of the bucket, by offset.
        ends: how far the bucket has come, in bytes, each time it has come further; to its end.
    """
    digests: list[bytes] = []
    coming = iter(ends)
    end = 0
    for slot in slots:
        hasher = xxhash.xxh3_128()
        at, stop = slot.offset, slot.offset + slot.num_bytes
        while at < stop:
            if end <= at:
                end = next(coming)
                continue
            hasher.update(data[at : min(end, stop)])  # releases the GIL
            at = min(end, stop)
        digests.append(hasher.digest())
    for _ in coming:
        pass
    return tuple(digests)


def digest_of_parts(parts: Iterable[memoryview]) -> bytes:
    """Return the digest of what lies in parts, one after the other; releases the GIL."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def digests_of(parts: Iterable[bytes | memoryview]) -> tuple[bytes, ...]:
    """Return the digest of each parameter of a bucket."""
    return tuple(map(digest_of, parts))


def bucket_digest(digests: Sequence[bytes]) -> bytes:
    """Return the digest of a bucket: over the digests of its parameters, in the order in which they
    lie. So one pass over the bytes finds what is damaged and names it.
    """
    return digest_of(b"".join(digests))


def whole_digest(digests: Sequence[bytes]) -> str:
    """Return the digest of a version, in hex: over the digests of its buckets, in order."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))


def trailer_bytes(manifest: WeightManifest) -> int:
    """Return the size of the trailer."""
    return _HEADER.size + DIGEST_BYTES * len(manifest.bucket_bytes)


def make_trailer(manifest: WeightManifest, digests: Sequence[bytes]) -> bytes:
    """Return what follows the last bucket."""
    return _HEADER.pack(manifest.term, manifest.version) + b"".join(digests)


def trailer_digest(manifest: WeightManifest, trailer: bytes) -> str:
    """Return the digest of the version that was sent, in hex, where what arrived cannot be seen.

    Raises:
        WeightsMismatch: if it is another version, or not a trailer of this manifest.
    """
    if len(trailer) != trailer_bytes(manifest):
        msg = f"the trailer of version {manifest.version} has {len(trailer)} bytes"
        raise WeightsMismatch(msg)
    _check_header(manifest, trailer)
    digests = trailer[_HEADER.size :]
    starts = range(0, len(digests), DIGEST_BYTES)
    return whole_digest([digests[start : start + DIGEST_BYTES] for start in starts])


def check_trailer(manifest: WeightManifest, trailer: bytes, digests: Sequence[bytes]) -> None:
    """Compare the digests of what arrived with those of what was sent.

    Raises:
        WeightsMismatch: if they differ; the text names the bucket and its parameters.
    """
    _check_header(manifest, trailer)
    for bucket, digest in enumerate(digests):
        start = _HEADER.size + bucket * DIGEST_BYTES
        if digest != trailer[start : start + DIGEST_BYTES]:
            names = [slot.name for slot in manifest.slots if slot.bucket == bucket]
            msg = (
                f"bucket {bucket} of {len(digests)} ({names[0]} ... {names[-1]}) of version"
                f" {manifest.version} was damaged on the way"
            )
            raise WeightsMismatch(msg)


def _check_header(manifest: WeightManifest, trailer: bytes) -> None:
    term, version = _HEADER.unpack_from(trailer)
    if (term, version) != (manifest.term, manifest.version):
        msg = (
            f"version {manifest.version} of term {manifest.term} was announced, and version"
            f" {version} of term {term} arrived"
        )
        raise WeightsMismatch(msg)
