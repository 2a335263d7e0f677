"""The time in which a load can be given up."""

from __future__ import annotations

import asyncio

import pytest

from ratchet.errors import TransferFailed
from ratchet.transport.weights.scope import LoadScope


async def for_ever() -> None:
    await asyncio.Event().wait()


def test_the_deadline_ends_a_load() -> None:
    async def main() -> None:
        await LoadScope(0.01, "too late").run(for_ever())

    with pytest.raises(TransferFailed, match="too late"):
        asyncio.run(main())


def test_the_first_abort_ends_a_load() -> None:
    async def main() -> None:
        scope = LoadScope(60, "too late")
        load = asyncio.create_task(scope.run(for_ever()))
        await asyncio.sleep(0)
        scope.abort("first")
        scope.abort("second")
        async with asyncio.timeout(5):
            with pytest.raises(TransferFailed, match="first"):
                await load
        scope.abort("third")

    asyncio.run(main())


def test_an_abort_before_the_commit_wins() -> None:
    """Even when the load has not noticed it yet."""

    async def main() -> None:
        scope = LoadScope(60, "too late")

        async def load() -> None:
            scope.abort("burnt")
            scope.commit()

        with pytest.raises(TransferFailed, match="burnt"):
            await scope.run(load())

    asyncio.run(main())


def test_after_the_commit_neither_abort_nor_deadline_ends_a_load() -> None:
    async def main() -> str:
        scope = LoadScope(0.02, "too late")

        async def load() -> str:
            scope.commit()
            scope.abort("too late")
            await asyncio.sleep(0.05)
            return "stamped"

        return await scope.run(load())

    assert asyncio.run(main()) == "stamped"


def test_a_timeout_of_the_engine_itself_is_not_mistaken() -> None:
    async def main() -> None:
        async def load() -> None:
            msg = "the engine's own"
            raise TimeoutError(msg)

        await LoadScope(60, "too late").run(load())

    with pytest.raises(TimeoutError, match="the engine's own"):
        asyncio.run(main())
