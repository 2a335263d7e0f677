"""Weight sync between real processes that are killed, stopped, late and new.

The product's publisher and registry are here, its rollout actors in processes of their own, with
real receivers and real gloo.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

import psutil
import pytest
from tests.helpers.weight_fleet import Fleet, Trainer
from tests.helpers.weight_process import (
    HOST,
    Child,
    Deafen,
    Hold,
    Middle,
    Planned,
    Send,
    State,
    run_trainer,
)

from ratchet.errors import RatchetError
from ratchet.messages import AcquireTerm, LoadWeights

LONG_S, SHORT_S = 40.0, 5.0
AT_ONCE_S = 8.0
"""Generous for a loaded machine, and a fifth of the timeout that would else be waited for."""

Scenario = Callable[[str], Awaitable[None]]


NAMES = tuple(f"rollout-{number}" for number in range(4))
VICTIM, *OTHERS = NAMES


async def four(transport: str, timeout_s: float) -> tuple[Fleet, Trainer]:
    """Four engines, which hold version 0."""
    fleet = Fleet(transport, timeout_s)
    await asyncio.gather(*(fleet.engine(name) for name in NAMES))
    trainer = await fleet.trainer()
    await trainer.publish()
    while behind := [name for name in NAMES if name not in trainer.publisher.holders]:
        # new processes may be slow to come, on a busy machine
        if await trainer.publisher.catch_up(fleet.roles[behind[0]]) is None:
            await trainer.publisher.publish_again()
    await trainer.hold(*NAMES)
    return fleet, trainer


# --- what may happen, and what must come of it


async def one_is_killed_in_the_middle(transport: str) -> None:
    fleet, trainer = await four(transport, LONG_S)
    fleet.children[VICTIM].say(Hold(3))
    publishing = asyncio.create_task(trainer.publish())
    assert isinstance(await fleet.children[VICTIM].hear(), Middle)
    start = monotonic()
    await fleet.kill(VICTIM)
    published = await publishing
    assert monotonic() - start < AT_ONCE_S
    assert sorted(published.loaded) == OTHERS
    assert published.failed == (fleet.roles[VICTIM],)
    assert fleet.state_of(published.version) == "live"
    await trainer.hold(*OTHERS)
    await trainer.sync_well(*OTHERS)  # the registry has seen it go


async def one_is_stopped_for_longer_than_the_timeout(transport: str) -> None:
    fleet, trainer = await four(transport, SHORT_S)
    fleet.children[VICTIM].say(Hold(3))
    publishing = asyncio.create_task(trainer.publish())
    assert isinstance(await fleet.children[VICTIM].hear(), Middle)
    start = monotonic()
    os.kill(fleet.children[VICTIM].pid, signal.SIGSTOP)
    published = await publishing
    assert monotonic() - start < SHORT_S + AT_ONCE_S
    assert sorted(published.loaded) == OTHERS
    assert published.failed == (fleet.roles[VICTIM],)
    await trainer.hold(*OTHERS)
    await asyncio.sleep(max(0.0, start + SHORT_S + 1.5 - monotonic()))  # and longer than its own
    os.kill(fleet.children[VICTIM].pid, signal.SIGCONT)
    state = await eventually(fleet.children[VICTIM], lambda state: not state.paused)
    assert state.version is None, "it is quarantined"
    caught_up = await trainer.publisher.catch_up(fleet.roles[VICTIM])
    assert caught_up is not None
    assert caught_up.loaded == (VICTIM,)
    await trainer.hold(*NAMES)
    await trainer.sync_well(*NAMES)


async def one_answers_late(transport: str) -> None:
    fleet, trainer = await four(transport, SHORT_S)
    fleet.children[VICTIM].say(Deafen(True))
    start = monotonic()
    published = await trainer.publish()
    assert monotonic() - start < SHORT_S + AT_ONCE_S
    assert sorted(published.loaded) == OTHERS
    assert published.failed == (fleet.roles[VICTIM],)
    fleet.children[VICTIM].say(Deafen(False))  # and it comes to a transfer that is over
    caught_up = await trainer.publisher.catch_up(fleet.roles[VICTIM])
    assert caught_up is not None
    assert caught_up.loaded == (VICTIM,)
    await trainer.hold(*NAMES)
    await trainer.sync_well(*NAMES)


async def one_joins_late_and_one_restarts_with_old_weights(transport: str) -> None:
    fleet, trainer = await four(transport, LONG_S)
    await trainer.sync_well(*NAMES)
    await fleet.kill(VICTIM)
    await fleet.engine(VICTIM, incarnation="b", seed=0)  # its weights are those of version 0
    await fleet.engine("rollout-4")
    held = await fleet.states(VICTIM, "rollout-4")
    for name in (VICTIM, "rollout-4"):
        assert (await fleet.children[name].state()).version is None
        caught_up = await trainer.publisher.catch_up(fleet.roles[name])
        assert caught_up is not None
        assert caught_up.loaded == (name,)
        assert caught_up.version == trainer.publisher.live
    await trainer.hold(*NAMES, "rollout-4")
    assert await fleet.states(VICTIM, "rollout-4") == held
    await trainer.sync_well(*NAMES, "rollout-4")


async def a_step_ends_a_catch_up(transport: str) -> None:
    fleet, trainer = await four(transport, LONG_S)
    late = await fleet.engine("rollout-4")
    fleet.children["rollout-4"].say(Hold(3))
    catching_up = asyncio.create_task(trainer.publisher.catch_up(late))
    assert isinstance(await fleet.children["rollout-4"].hear(), Middle)
    start = monotonic()
    await trainer.sync_well(*NAMES, "rollout-4")  # the slow one too: the newer version frees it
    cut = await catching_up
    assert monotonic() - start < AT_ONCE_S
    assert cut is not None
    assert cut.failed == (late,)


async def the_trainer_is_killed_and_another_takes_over(transport: str) -> None:
    fleet = Fleet(transport, LONG_S)
    await asyncio.gather(*(fleet.engine(name) for name in NAMES[:2]))
    process, loads = await a_trainer_in_the_middle(fleet)
    start = monotonic()
    await asyncio.to_thread(process.kill)
    for load in await asyncio.gather(*loads, return_exceptions=True):
        assert type(load).__name__ == "TransferFailed", load
    assert monotonic() - start < AT_ONCE_S
    assert not any(state.paused for state in (await fleet.states()).values())
    successor = await fleet.trainer()
    assert successor.publisher.term == 2
    await successor.sync_well(*NAMES[:2])


async def a_stopped_trainer_comes_back_after_another_took_over(transport: str) -> None:
    fleet = Fleet(transport, SHORT_S)
    await asyncio.gather(*(fleet.engine(name) for name in NAMES[:2]))
    process, loads = await a_trainer_in_the_middle(fleet)
    os.kill(process.pid, signal.SIGSTOP)
    successor = await fleet.trainer()
    start = monotonic()
    await successor.sync_well(*NAMES[:2])  # supersedes what the engines still wait for
    for load in await asyncio.gather(*loads, return_exceptions=True):
        assert type(load).__name__ == "TransferFailed", load
    assert monotonic() - start < AT_ONCE_S
    os.kill(process.pid, signal.SIGCONT)
    zombie = Child("trainer", run_trainer, fleet.weights)
    fleet.all.append(zombie)
    for load in await offer(fleet, zombie, Send(9, engines_of(fleet))):
        with pytest.raises(RatchetError, match="refuses term 1: it has seen term 2"):
            await load
    await successor.hold(*NAMES[:2])


async def everyone_is_killed(transport: str) -> None:
    fleet = Fleet(transport, LONG_S)
    await asyncio.gather(*(fleet.engine(name) for name in NAMES[:2]))
    trainer = await fleet.trainer()
    await trainer.sync_well(*NAMES[:2])
    for name in NAMES[:2]:
        fleet.children[name].say(Hold(3))
    publishing = asyncio.create_task(trainer.publish())
    for name in NAMES[:2]:
        assert isinstance(await fleet.children[name].hear(), Middle)
        await fleet.kill(name)
    published = await publishing
    assert (published.loaded, len(published.failed)) == ((), 2)
    assert fleet.state_of(1) == "burnt"
    assert trainer.publisher.live is None
    await fleet.engine(VICTIM, incarnation="b")
    published = await trainer.publisher.publish_again()
    assert (published.version, published.loaded) == (2, (VICTIM,))
    await trainer.hold(VICTIM)


async def a_trainer_in_the_middle(
    fleet: Fleet,
) -> tuple[Child, list[asyncio.Future[Any]]]:
    """Start a trainer of term 1 as a process, and a transfer that stands still in the middle."""
    await fleet.ask(fleet.registry, AcquireTerm("trainer", "t"))
    process = Child("trainer", run_trainer, fleet.weights)
    fleet.all.append(process)
    loads = await offer(fleet, process, Send(0, engines_of(fleet), hold_read=8))
    assert isinstance(await process.hear(), Middle)
    return process, loads


def engines_of(fleet: Fleet) -> tuple[str, ...]:
    return tuple(f"{role.name}/{role.incarnation}" for role in fleet.roles.values())


async def offer(fleet: Fleet, process: Child, send: Send) -> list[asyncio.Future[Any]]:
    """Carry the offers of a trainer process to its engines."""
    process.say(send)
    planned = await process.hear()
    assert isinstance(planned, Planned)
    return [
        asyncio.ensure_future(
            fleet.ask(
                fleet.ref(role.name),
                LoadWeights(
                    role.incarnation,
                    planned.manifest,
                    planned.routes[f"{role.name}/{role.incarnation}"],
                ),
                timeout=60.0,
            )
        )
        for role in fleet.roles.values()
    ]


async def eventually(child: Child, condition: Callable[[State], bool]) -> State:
    while not condition(state := await child.state()):  # noqa: ASYNC110 - of another process
        await asyncio.sleep(0.02)
    return state


async def nothing_listens_elsewhere(transport: str) -> None:
    fleet, trainer = await four(transport, LONG_S)
    await trainer.sync_well(*NAMES)
    listening = [
        connection.laddr.ip
        for pid in (os.getpid(), *(child.pid for child in fleet.all))
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 2, "the store and the groups listen somewhere"
    assert set(listening) == {HOST}


ONCE = {
    one_is_killed_in_the_middle: "broadcast",
    one_is_stopped_for_longer_than_the_timeout: "broadcast",
    one_answers_late: "p2p",
    one_joins_late_and_one_restarts_with_old_weights: "broadcast",
    a_step_ends_a_catch_up: "p2p",
    the_trainer_is_killed_and_another_takes_over: "broadcast",
    a_stopped_trainer_comes_back_after_another_took_over: "p2p",
    everyone_is_killed: "broadcast",
    nothing_listens_elsewhere: "p2p",
}
"""Each scenario, and the transport that it is played over in the default run."""

MANY = [scenario for scenario in ONCE if scenario is not nothing_listens_elsewhere]
"""What may go otherwise another time. Ten times over every transport takes ten minutes."""

TRANSPORTS = ("broadcast", "p2p", "shared memory")


def play(scenario: Scenario, transport: str) -> None:
    async def limited() -> None:
        try:
            async with asyncio.timeout(100):
                await scenario(transport)
        finally:
            while Fleet.living:
                await Fleet.living.pop().end()

    asyncio.run(limited())


@pytest.mark.parametrize("scenario", ONCE, ids=lambda scenario: scenario.__name__)
def test_once(scenario: Scenario) -> None:
    play(scenario, ONCE[scenario])


@pytest.mark.soak
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("scenario", MANY, ids=lambda scenario: scenario.__name__)
@pytest.mark.parametrize("time", range(10))
def test_ten_times(scenario: Scenario, transport: str, time: int) -> None:
    del time
    play(scenario, transport)
