"""The real buffer against a simple model of it, over whatever others may tell it.

Claims are repeated, lost and reordered; finishes late, twice, failed, aborted, of versions that
nobody has told the buffer; versions out of order and burnt; leases end, workers die, trainers ask
again, are taken over, and speak on as zombies. After each message the model says what must have
followed, group by group. 10,000 runs of 60 messages took 10 minutes on
one of two cores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from tests.helpers.buffer_machine import MANY, Buffer


class BoundedBuffer(Buffer):
    """The same, where an order of training has to be kept: little else happens."""

    @initialize(batch_groups=st.integers(1, 2), max_staleness=st.integers(1, 2))
    def begin(self, batch_groups: int, max_staleness: int) -> None:  # type: ignore[override]
        super().begin(
            None,
            7,
            batch_groups=batch_groups,
            max_staleness=max_staleness,
            admission="bounded",
            capacity_factor=3.0,
        )

    @rule(what=st.sampled_from(["finish", "train", "publish", "claim"]), which=MANY, more=MANY)
    def happens(self, what: str, which: int, more: int) -> None:  # type: ignore[override]
        super().happens(what, which, 1, more)


@pytest.fixture
def machine() -> Iterator[type[Buffer]]:
    loop = asyncio.new_event_loop()  # actors are made for one; nothing runs on it
    yield type("Buffer", (Buffer,), {"loop": loop})
    loop.close()


@pytest.fixture
def bounded_machine() -> Iterator[type[Buffer]]:
    loop = asyncio.new_event_loop()
    yield type("BoundedBuffer", (BoundedBuffer,), {"loop": loop})
    loop.close()


def check(machine: type[Buffer], **kwargs: Any) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],  # to explain a failure would take minutes
            **kwargs,
        ),
    )


def test_a_bounded_one_trains_what_must_go(bounded_machine: type[Buffer]) -> None:
    check(bounded_machine, max_examples=30, stateful_step_count=40, derandomize=True)


@pytest.mark.timeout(600)  # of which a failure takes half, to be made small
def test_it_does_what_the_model_says(machine: type[Buffer]) -> None:
    check(machine, max_examples=200, stateful_step_count=40, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_it_does_what_the_model_says_for_long(machine: type[Buffer]) -> None:
    check(machine, max_examples=10_000, stateful_step_count=60)
