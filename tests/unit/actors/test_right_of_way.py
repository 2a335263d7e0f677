from __future__ import annotations

import asyncio

from tests.simulation.loop import run_virtual

from ratchet.actors.right_of_way import RightOfWay


def test_who_goes_first_ends_who_gives_way_and_passes_those_that_wait() -> None:
    async def main() -> None:
        road, order = RightOfWay(), []

        async def last(name: str) -> None:
            async with road.last() as cut:
                order.append(name)
                order.append(await cut)

        async def first(name: str) -> None:
            async with road.first(f"for {name}"):
                order.append(name)
                await asyncio.sleep(1)

        waiting = [asyncio.ensure_future(last(name)) for name in ("a", "b")]
        await asyncio.sleep(1)
        await asyncio.gather(first("x"), first("y"))
        await asyncio.sleep(1)
        assert order == ["a", "for x", "x", "y", "b"]
        await first("z")
        await asyncio.gather(*waiting)
        assert order == ["a", "for x", "x", "y", "b", "for z", "z"]

    run_virtual(main())


def test_who_gives_way_goes_on_when_the_one_that_goes_first_is_cancelled_in_line() -> None:
    """Cancelled, but not yet told so: it waits no longer, and still counts."""

    async def main() -> None:
        road = RightOfWay()

        async def first() -> None:
            async with road.first("me"):
                pass

        async def last() -> None:
            async with road.last():
                pass

        async with road.first("the first"):
            one = asyncio.ensure_future(last())
            await asyncio.sleep(0)
            waiter = asyncio.ensure_future(first())
            await asyncio.sleep(0)
        waiter.cancel()
        await one

    run_virtual(main())
