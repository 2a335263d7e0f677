from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from weakref import ref

import pytest
import torch
from tests.helpers.weights import FakeSource, make_tensors

from ratchet.backends.training.snapshot import Snapshot


def equal(snapshot: Snapshot, seed: int) -> bool:
    expected = make_tensors(seed)
    return all(
        torch.equal(copy, expected[name])
        for name, copy in zip(expected, snapshot.read(list(expected)), strict=True)
    )


def test_it_reads_what_was_copied_while_the_weights_move_on() -> None:
    async def main() -> None:
        source = FakeSource(make_tensors(0), {"head.weight": "embed.weight"})
        snapshot = Snapshot(source)
        await snapshot.take(0)
        assert snapshot.specs() == source.specs()
        for name, new in make_tensors(1).items():
            source.tensors[name].copy_(new)  # in place, as an optimiser does
        with snapshot.reading(0):
            assert equal(snapshot, 0)
            await snapshot.take(1)
            assert equal(snapshot, 0)  # still, as long as it is read
        with snapshot.reading(1):
            assert equal(snapshot, 1)

    asyncio.run(main())


def test_there_are_two_copies_at_most_and_one_when_none_is_behind() -> None:
    async def main() -> None:
        source = FakeSource(make_tensors(0))
        snapshot = Snapshot(source)
        await snapshot.take(0)
        with snapshot.reading(0):
            first = snapshot.read(["embed.weight"])[0]
        await snapshot.take(1)
        with snapshot.reading(1):
            assert snapshot.read(["embed.weight"])[0] is first  # written over
            await snapshot.take(2)
            behind, first = ref(first), torch.empty(0)
            await snapshot.take(3)  # nobody has read 2
        gc.collect()
        assert behind() is None
        with snapshot.reading(3):
            pass

    asyncio.run(main())


def test_it_gathers_in_chunks_and_off_the_event_loop() -> None:
    asked: list[list[str]] = []
    source = FakeSource(make_tensors(0), {"head.weight": "embed.weight"})
    source.on_read = lambda names: asked.append(list(names))
    asyncio.run(Snapshot(source, chunk_bytes=300 * 300 * 2 * 2).take(0))
    assert [name for names in asked for name in names] == list(source.tensors)  # no alias
    assert [len(names) for names in asked[:3]] == [2, 2, 2]
    assert threading.main_thread().name not in source.threads


def test_what_is_not_there_cannot_be_read() -> None:
    async def main() -> None:
        source = FakeSource(make_tensors(0))
        snapshot = Snapshot(source)
        with pytest.raises(RuntimeError, match="no version is being read"):
            snapshot.read(["steps"])
        with pytest.raises(RuntimeError, match="version 0 is not there"), snapshot.reading(0):
            pass
        await snapshot.take(0)
        await snapshot.take(1)
        with pytest.raises(RuntimeError, match="version 0 is not there"), snapshot.reading(0):
            pass

        def torn(names: Sequence[str]) -> None:
            raise MemoryError

        source.on_read = torn
        with pytest.raises(MemoryError):
            await snapshot.take(2)
        for version in (1, 2):  # half of each
            with pytest.raises(RuntimeError), snapshot.reading(version):
                pass

    asyncio.run(main())
