"""Weight sync between real processes that are killed and stopped in the middle of a transfer."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import psutil
import pytest
from tests.helpers.weight_process import (
    HOST,
    Abort,
    Child,
    Ended,
    Exit,
    Load,
    Middle,
    Planned,
    Send,
    big_tensors,
    run_engine,
    run_trainer,
)
from tests.helpers.weights import FakeSource, digest_of_tensors

from ratchet.config import WeightsConfig
from ratchet.errors import TransferFailed
from ratchet.transport.weights.base import WeightSender
from ratchet.transport.weights.registry import open_sender
from ratchet.types import WeightManifest

BUCKET_MIB = 2.0
LONG_S, SHORT_S = 30.0, 2.0
AT_ONCE_S = 5.0
"""Generous for a loaded machine, and a sixth of the timeout that would else be waited for."""


class Engines:
    """Engine processes, kept from test to test as long as they live."""

    def __init__(self) -> None:
        self.living: dict[str, Child] = {}
        self.started = 0

    def get(self, count: int) -> dict[str, Child]:
        while len(self.living) < count:
            self.started += 1
            config = {"bucket_mib": BUCKET_MIB}
            self.living[f"rollout-{self.started}/a"] = Child(run_engine, config)
        return dict(list(self.living.items())[:count])

    def end(self, name: str) -> None:
        self.living.pop(name).end()


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    engines = Engines()
    yield engines
    for name in list(engines.living):
        engines.end(name)


class Trainer:
    """The sending end, in the test's own process."""

    def __init__(self, timeout_s: float) -> None:
        self.source = FakeSource(big_tensors(0))
        config = WeightsConfig(bucket_mib=BUCKET_MIB, timeout_s=timeout_s)
        self.sender: WeightSender = open_sender(config, HOST, self.source)
        self.version = 0

    def start(
        self, children: dict[str, Child], hold: dict[str, int] | None = None
    ) -> asyncio.Task[Any]:
        self.version += 1
        self.source.tensors = big_tensors(self.version)
        manifest, routes = self.sender.plan(1, self.version, self.version, list(children))
        for name, child in children.items():
            child.tell(Load(manifest, routes[name], (hold or {}).get(name)))
        return asyncio.create_task(self.sender.send(manifest))

    async def sync_well(self, children: dict[str, Child]) -> None:
        sent = await self.start(children)
        assert sent.digest == digest_of_tensors(self.source.tensors, int(BUCKET_MIB * 2**20))
        for child in children.values():
            assert await child.hear() == Ended(None, "", sent.digest, self.version)


def run(main: Callable[[], Any]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(100):
            await main()

    asyncio.run(limited())


def test_processes_sync_and_listen_on_loopback_only(engines: Engines) -> None:
    async def main() -> None:
        trainer, children = Trainer(LONG_S), engines.get(3)
        await trainer.sync_well(children)
        await trainer.sync_well(children)
        listening = [
            connection.laddr.ip
            for pid in (os.getpid(), *(child.pid for child in children.values()))
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert len(listening) >= 2, "the store and the groups listen somewhere"
        assert set(listening) == {HOST}
        await trainer.sender.close()

    run(main)


def test_one_of_three_engines_is_killed(engines: Engines) -> None:
    async def main() -> None:
        trainer, children = Trainer(LONG_S), engines.get(3)
        await trainer.sync_well(children)
        victim = next(iter(children))
        send = trainer.start(children, hold={victim: 3})
        assert isinstance(await children[victim].hear(), Middle)
        start = monotonic()
        engines.end(victim)
        with pytest.raises(TransferFailed, match=f"version 2 was lost on its way to {victim}, "):
            await send
        del children[victim]
        for child in children.values():  # nobody has told them
            assert_failed(await child.hear())
        assert monotonic() - start < AT_ONCE_S
        await trainer.sync_well(children)
        await trainer.sync_well(engines.get(3))
        await trainer.sender.close()

    run(main)


def test_one_of_three_engines_is_stopped(engines: Engines) -> None:
    async def main() -> None:
        trainer, children = Trainer(SHORT_S), engines.get(3)
        await trainer.sync_well(children)
        victim = list(children)[1]
        send = trainer.start(children, hold={victim: 3})
        assert isinstance(await children[victim].hear(), Middle)
        start = monotonic()
        os.kill(children[victim].pid, signal.SIGSTOP)
        with pytest.raises(TransferFailed):
            await send
        assert monotonic() - start < SHORT_S + AT_ONCE_S
        stopped = children.pop(victim)
        for child in children.values():
            assert_failed(await child.hear())
        await trainer.sync_well(children)
        os.kill(stopped.pid, signal.SIGCONT)
        assert_failed(await stopped.hear())
        await trainer.sync_well({**children, victim: stopped})
        await trainer.sender.close()

    run(main)


def test_abort_frees_the_survivors_long_before_the_timeout(engines: Engines) -> None:
    """An operation of gloo that waits for a stopped peer ends with its timeout; `receive` does not
    wait for that, nor does the next transfer.
    """

    async def main() -> None:
        trainer, children = Trainer(LONG_S), engines.get(3)
        await trainer.sync_well(children)
        victim = next(iter(children))
        send = trainer.start(children, hold={victim: 3})
        assert isinstance(await children[victim].hear(), Middle)
        os.kill(children[victim].pid, signal.SIGSTOP)
        stopped = children.pop(victim)
        start = monotonic()
        for child in children.values():
            child.tell(Abort("one engine stands still"))
        for child in children.values():
            ended = await child.hear()
            assert_failed(ended)
            assert ended.text == "one engine stands still"
        send.cancel()
        await asyncio.wait([send])
        await trainer.sync_well(children)
        assert monotonic() - start < 2 * AT_ONCE_S
        os.kill(stopped.pid, signal.SIGCONT)
        engines.end(victim)
        await trainer.sender.close()

    run(main)


@pytest.mark.parametrize("moment", ["before", "middle"])
def test_the_trainer_is_killed(engines: Engines, moment: str) -> None:
    async def main() -> None:
        children = engines.get(2)
        trainer, manifest = await a_trainer_in_a_transfer(children, moment)
        start = monotonic()
        trainer.end()
        for child in children.values():
            assert_failed(await child.hear())
        assert monotonic() - start < AT_ONCE_S
        assert manifest.version == 1
        successor = Trainer(LONG_S)
        await successor.sync_well(children)
        await successor.sender.close()

    run(main)


def test_the_trainer_is_stopped(engines: Engines) -> None:
    async def main() -> None:
        children = engines.get(2)
        trainer, _ = await a_trainer_in_a_transfer(children, "middle", timeout_s=SHORT_S)
        start = monotonic()
        os.kill(trainer.pid, signal.SIGSTOP)
        for child in children.values():
            assert_failed(await child.hear())
        assert monotonic() - start < SHORT_S + AT_ONCE_S
        successor = Trainer(LONG_S)
        await successor.sync_well(children)
        await successor.sender.close()
        trainer.end()

    run(main)


def test_engines_exit_cleanly_beside_a_live_group(engines: Engines) -> None:
    async def main() -> None:
        trainer, children = Trainer(LONG_S), engines.get(2)
        await trainer.sync_well(children)
        for name, child in children.items():
            child.tell(Exit())
            await asyncio.to_thread(child.process.join, 10)
            assert child.process.exitcode == 0
            engines.end(name)
        await trainer.sender.close()

    run(main)


async def a_trainer_in_a_transfer(
    children: dict[str, Child], moment: str, timeout_s: float = LONG_S
) -> tuple[Child, WeightManifest]:
    """Start a trainer process, and a transfer that stands still before it begins or in the
    middle.
    """
    trainer = Child(run_trainer, {"bucket_mib": BUCKET_MIB, "timeout_s": timeout_s})
    absent = ["rollout-absent/a"] if moment == "before" else []
    trainer.tell(Send(1, (*children, *absent), hold_read=8))
    planned = await trainer.hear()
    assert isinstance(planned, Planned)
    for name, child in children.items():
        child.tell(Load(planned.manifest, planned.routes[name]))
    if moment == "middle":
        assert isinstance(await trainer.hear(), Middle)
    return trainer, planned.manifest


def assert_failed(ended: Any) -> None:
    assert isinstance(ended, Ended)
    assert ended.error == "TransferFailed"
    assert ended.version is None or ended.version >= 1
    assert not ended.paused
