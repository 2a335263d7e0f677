"""Which memory a transfer is received into, and when it is used again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ratchet.transport.weights.staging import Staging, staging_sizes

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("buckets", "limit", "sizes"),
    [
        pytest.param([8, 8, 4], 20, (8, 8, 4), id="all of it"),
        pytest.param([8, 8, 4], 19, (8, 8), id="two in turns"),
        pytest.param([8, 8, 8, 4], 27, (8, 8, 8), id="as many as fit"),
        pytest.param([8, 8, 4], 1, (8, 8), id="at least two"),
        pytest.param([4, 64, 4], 70, (64, 64), id="of the largest"),
        pytest.param([8, 4], 1, (8, 4), id="no more than there are"),
        pytest.param([8], 1, (8,), id="one"),
    ],
)
def test_as_much_is_staged_as_may_be(buckets: list[int], limit: int, sizes: tuple[int]) -> None:
    assert staging_sizes(buckets, limit) == sizes


def test_memory_is_kept_while_it_fits() -> None:
    staging = Staging()
    first = places(staging, 64, 32)
    assert places(staging, 48, 32) == first
    assert len(staging.buffers([48, 48], CPU)[1]) == 48
    assert [buffer.device.type for buffer in staging.buffers([48, 48], torch.device("meta"))] == [
        "meta",
        "meta",
    ]


def test_an_engine_and_the_next_transfer_take_turns() -> None:
    staging = Staging()
    seen = []
    for _ in range(4):
        seen.append(places(staging, 64, 64))
        staging.hand_over()()
    assert not set(seen[0]) & set(seen[1])
    assert seen[2:] == seen[:2]


def test_what_an_engine_may_hold_after_a_failure_is_not_used_again() -> None:
    staging = Staging()
    held = [weakref.ref(buffer) for buffer in staging.buffers([64], CPU)]
    staging.hand_over()()
    held += [weakref.ref(buffer) for buffer in staging.buffers([64], CPU)]
    staging.hand_over()  # nobody says that it was adopted
    gc.collect()
    assert [ref() for ref in held] == [None, None]


def places(staging: Staging, *sizes: int) -> list[int]:
    return [buffer.data_ptr() for buffer in staging.buffers(sizes, CPU)]
