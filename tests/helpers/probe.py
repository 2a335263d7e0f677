"""An actor that does what a message names, and what may be told to it."""

from __future__ import annotations

import asyncio
from typing import Any, assert_never

import structlog.contextvars
from tests.helpers.actors import RecordingLog

from ratchet.actors.actor import Actor, Answer
from ratchet.actors.system import System, current_actor
from ratchet.messages import Ask, Message
from ratchet.transport.mailbox.base import current_trace


class Done(Message, frozen=True):
    value: Any = None


class Run(Ask[Done], frozen=True):
    what: str
    to: str = ""


class Tick(Message, frozen=True):
    what: str = ""


class Unknown(Ask[Done], frozen=True):
    pass


class Probe(Actor[Run | Tick]):
    """Runs the method that a message names, and answers with what it returns."""

    def __init__(self, system: System, name: str = "probe") -> None:
        super().__init__(system, name)
        self.notes: list[Any] = []

    def receive(self, message: Run | Tick) -> Answer:
        match message:
            case Tick():
                if message.what:
                    getattr(self, message.what)()
                self.notes.append((self.now(), current_trace.get()))
                return None
            case Run():
                answer = getattr(self, message.what)(*([message.to] if message.to else []))
                if asyncio.iscoroutine(answer):
                    return self.spawn(answer, name=message.what)
                return Done(answer)
            case _:
                assert_never(message)

    def context(self) -> Any:
        return current_trace.get(), structlog.contextvars.get_contextvars(), current_actor.get()

    async def child_context(self) -> Done:
        before = self.context()
        await asyncio.sleep(1)
        assert self.context() == before
        return Done(before)

    async def ask_other(self, to: str) -> Done:
        return await self.ask(self.system.ref(to), Run("context"))

    async def ask_nothing(self, to: str) -> Done:
        return await self.ask(self.system.ref(to), Run("hang"), timeout=4)

    async def ask_back(self, to: str) -> Done:
        """Make the other one ask me something that I never answer."""
        back = "ask_b" if to == "b" else "ask_a"
        return await self.ask(self.system.ref(to), Run(back), timeout=5)

    async def ask_a(self) -> Done:
        return await self.ask(self.system.ref("a"), Run("hang"), timeout=9)

    async def ask_b(self) -> Done:
        return await self.ask(self.system.ref("a"), Run("hang"), timeout=9)

    async def hang(self) -> Done:
        await asyncio.Event().wait()
        raise AssertionError

    def forward(self, to: str) -> Any:
        return self.system.ref(to).ask(Run("context"), block=False)

    def set_timer(self) -> None:
        self.after(10, Tick())

    def log_something(self) -> None:
        self.log.info("something", field=1)


def log_of(system: System) -> RecordingLog:
    assert isinstance(system.log, RecordingLog)
    return system.log
