from __future__ import annotations

import asyncio

import pytest

from ratchet.runtime.beside import beside


def test_work_ends_with_the_block() -> None:
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ends.append("work")

    async def main() -> None:
        async with beside(work(), failed=lambda: ends.append("failed")) as (task,):
            await asyncio.sleep(0)
        ends.append("block")
        assert task.cancelled()

    asyncio.run(main())
    assert ends == ["work", "block"]


def test_work_that_fails_ends_the_block_and_is_told() -> None:
    async def work() -> None:
        raise LookupError("a bug")

    async def main() -> None:
        over = asyncio.Event()
        with pytest.raises(LookupError, match="a bug"):
            async with asyncio.timeout(5), beside(work(), failed=over.set):
                await over.wait()

    asyncio.run(main())


def test_an_error_of_the_block_comes_before_that_of_the_work() -> None:
    async def work() -> None:
        raise LookupError("a bug")

    async def main() -> None:
        over = asyncio.Event()
        async with asyncio.timeout(5), beside(work(), failed=over.set):
            await over.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(main())


def test_work_that_is_done_has_its_result() -> None:
    async def work() -> int:
        return 7

    async def main() -> int:
        async with beside(work(), failed=lambda: None) as (task,):
            await asyncio.sleep(0)
        return task.result()

    assert asyncio.run(main()) == 7
