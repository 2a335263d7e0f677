"""A leader and a follower in one process, over a channel in memory, and what they did."""

import asyncio
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ratchet.backends.training.base import GradientReport, StepReport
from ratchet.backends.training.channel import Verdict
from ratchet.backends.training.commands import Command
from ratchet.backends.training.fake import FakeBackend
from ratchet.backends.training.ranks import Leader, follow
from ratchet.types import RolloutGroup

WITHIN_S = 20.0


class Wire:
    """What two ranks share: the announcements, and the verdicts on their way to each."""

    def __init__(self) -> None:
        self.commands: queue.Queue[Command] = queue.Queue()
        self.verdicts: tuple[queue.Queue[Verdict], ...] = (queue.Queue(), queue.Queue())


class MemoryChannel:
    """A `Channel` of two ranks in one process."""

    def __init__(self, wire: Wire, rank: int, log: list[str]) -> None:
        self.rank = rank
        self._wire = wire
        self._log = log

    def announce(self, command: Command) -> None:
        self._log.append(f"announce {type(command).__name__}")
        self._wire.commands.put(command)

    def receive(self) -> Command:
        return self._wire.commands.get(timeout=WITHIN_S)

    def agree(self, mine: Verdict) -> list[Verdict]:
        self._wire.verdicts[1 - self.rank].put(mine)
        theirs = self._wire.verdicts[self.rank].get(timeout=WITHIN_S)
        return [theirs, mine] if self.rank else [mine, theirs]


class Logged(FakeBackend):
    """Notes begin and end of the calls whose order matters; fails where it is told to."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log
        self.failure: Exception | None = None
        self.begun = threading.Event()
        self.go = threading.Event()
        self.go.set()

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        self.log.append("forward begins")
        self.begun.set()
        await asyncio.to_thread(self.go.wait, WITHIN_S)
        if self.failure is not None:
            raise self.failure
        report = await super().forward_backward(groups)
        self.log.append("forward ends")
        return report

    async def optimizer_step(self) -> StepReport:
        self.log.append("step")
        return await super().optimizer_step()

    def read(self, names: Sequence[str]) -> Any:
        self.log.append("read")
        return super().read(names)


class Gang:
    """A leader and a follower in a thread of its own."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.log: list[str] = []
        self.followed: list[str] = []
        self.mine, self.theirs = Logged(self.log), Logged(self.followed)
        self.leader = Leader(self.mine, MemoryChannel(self.wire, 0, self.log))
        self._thread = ThreadPoolExecutor(max_workers=1)
        channel = MemoryChannel(self.wire, 1, self.followed)
        self.follower: Future[None] = self._thread.submit(follow, self.theirs, channel)

    def ended(self) -> Exception | None:
        error = self.follower.exception(timeout=WITHIN_S)
        self._thread.shutdown()
        assert error is None or isinstance(error, Exception)
        return error


def run(body: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(WITHIN_S):
            await body()

    asyncio.run(main())
