from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.simulation.loop import run_virtual

from ratchet.actors.leases import Leases
from ratchet.types import Assignment, Prompt

LEASE_S = 10.0


def scenario(body: Callable[[Leases], Awaitable[None]], *, ahead: int = 0) -> None:
    async def main() -> None:
        leases = Leases(asyncio.get_running_loop().time, ahead=ahead)
        leases.count_for("b1")
        await body(leases)

    run_virtual(main())


def assignment(group_id: int) -> Assignment:
    return Assignment(group_id, 0, 0, Prompt(f"p{group_id}", "1>"), 2, LEASE_S)


def test_the_total_is_for_who_waits_and_some_ahead_and_never_falls() -> None:
    async def body(leases: Leases) -> None:
        assert leases.claim(0) == 1
        assert leases.claim(2) == 3
        assert leases.claim(0) == 3
        leases.put(assignment(1))
        assert leases.claim(3) == 4  # one of the four that are wanted is here

    scenario(body, ahead=1)


def test_a_prompt_that_lay_here_too_long_is_not_taken_and_its_credit_is_back() -> None:
    async def body(leases: Leases) -> None:
        assert leases.claim(1) == 1
        leases.put(assignment(1))
        await asyncio.sleep(LEASE_S)
        leases.put(assignment(2))
        assert (await leases.take()).group_id == 2
        assert (leases.num_here, leases.num_taken) == (0, 1)
        assert leases.claim(1) == 2  # of two received, one counts

    scenario(body)


def test_a_lapsed_group_is_late_and_its_credit_is_back_until_then() -> None:
    async def body(leases: Leases) -> None:
        for group_id in (1, 2):
            leases.put(assignment(group_id))
            await leases.take()
        await asyncio.sleep(4.0)
        assert leases.end(1, 0)
        await asyncio.sleep(LEASE_S)
        assert leases.claim(1) == 2  # two received, less the lapsed one, and one more
        assert not leases.end(2, 0)
        assert leases.claim(1) == 3
        assert leases.busy_s == 4.0 + 4.0 + LEASE_S
        assert not leases.end(3, 0)  # of another life of the buffer

    scenario(body)


def test_another_life_of_the_buffer_issues_again_what_is_here() -> None:
    async def body(leases: Leases) -> None:
        assert leases.claim(2) == 2
        for group_id in (1, 2):
            leases.put(assignment(group_id))
        await leases.take()
        leases.count_for("b1")
        assert (leases.num_here, leases.num_taken) == (1, 1)
        leases.count_for("b2")
        assert (leases.num_here, leases.num_taken) == (0, 0)
        assert leases.claim(1) == 1

    scenario(body)


def test_groups_that_never_end_are_not_in_flight_for_good() -> None:
    async def body(leases: Leases) -> None:
        for number in range(3):
            leases.put(assignment(number))
            await leases.take()
        assert leases.num_taken == 3
        await asyncio.sleep(LEASE_S)
        assert leases.num_taken == 0
        leases.put(assignment(3))
        await leases.take()
        assert leases.num_taken == 1
        assert not leases.end(0, 0)
        assert leases.busy_s == LEASE_S
        assert leases.end(3, 0)

    scenario(body)
