"""The contract of refs, on an actor in this process: on the caller's loop, by name, on another
loop, and in virtual time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tests.contract.ref_suite import RefSuite, Stage
from tests.helpers.actors import make_system
from tests.simulation.loop import run_virtual

from ratchet.actors.actor import Actor
from ratchet.actors.system import System
from ratchet.transport.mailbox.base import Ref


@asynccontextmanager
async def same_loop() -> AsyncIterator[Stage]:
    system = make_system()

    async def start(actor_class: type[Actor[Any]], name: str) -> Ref:
        return actor_class.start(system, name)

    yield Stage(system, system, start)


class TestSameLoop(RefSuite):
    def stage(self) -> AbstractAsyncContextManager[Stage]:
        return same_loop()


class TestVirtualTime(RefSuite):
    run = staticmethod(run_virtual)

    def stage(self) -> AbstractAsyncContextManager[Stage]:
        return same_loop()


class TestByName(RefSuite):
    @asynccontextmanager
    async def stage(self) -> AsyncIterator[Stage]:
        system = make_system()

        async def start(actor_class: type[Actor[Any]], name: str) -> Ref:
            actor_class.start(system, name)
            return system.ref(name)

        yield Stage(system, system, start)


class TestThroughADirectory(RefSuite):
    """Two systems; the caller's finds the actor through its `remote`."""

    @asynccontextmanager
    async def stage(self) -> AsyncIterator[Stage]:
        target: System = make_system()
        caller = make_system(remote=target)

        async def start(actor_class: type[Actor[Any]], name: str) -> Ref:
            actor_class.start(target, name)
            return caller.ref(name)

        yield Stage(caller, target, start)


class TestOtherLoop(RefSuite):
    """The actor runs on the loop of another thread."""

    @asynccontextmanager
    async def stage(self) -> AsyncIterator[Stage]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        caller, target = make_system(), make_system(loop=loop)

        async def start(actor_class: type[Actor[Any]], name: str) -> Ref:
            return await asyncio.to_thread(actor_class.start, target, name)

        async def end() -> None:
            target.abort()
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)

        try:
            yield Stage(caller, target, start)
        finally:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(end(), loop))
            loop.call_soon_threadsafe(loop.stop)
            await asyncio.to_thread(thread.join)
            loop.close()
