from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.contract.ref_suite import Target
from tests.helpers.actors import RecordingLog, Witness, make_system
from tests.simulation.loop import run_virtual

from ratchet.actors.system import Wait, WaitTable
from ratchet.errors import ActorDead
from ratchet.messages import AbortLoad, BurnVersion

ASK = BurnVersion(0, 3, "echo")


class FakeRef:
    def __init__(self, name: str, seen: list[Any]) -> None:
        self.name = name
        self.seen = seen

    def tell(self, message: Any) -> None:
        self.seen.append((self.name, "tell", message))

    async def _answer(self, message: Any, timeout: float) -> Any:
        self.seen.append((self.name, "ask", message, timeout))
        return "reply"

    def ask(self, message: Any, *, block: bool, timeout: float) -> Any:
        assert not block
        return self._answer(message, timeout)

    def watch(self, watcher: Any) -> None:
        self.seen.append((self.name, "watch", watcher))


class FakeDirectory:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def ref(self, name: str) -> Any:
        return FakeRef(name, self.seen)


def test_a_name_that_nobody_has() -> None:
    async def main() -> None:
        system = make_system()
        ref = system.ref("ghost")
        ref.tell(AbortLoad(0, 1, ""))
        with pytest.raises(ActorDead, match="there is no actor ghost"):
            await ref.ask(ASK, block=False)
        assert system.dead_letters.counts == {("ghost", "AbortLoad", "no such actor"): 1}
        assert isinstance(system.log, RecordingLog)
        (event,) = system.log.named("dead_letter")
        assert event == {
            "sender": None,
            "receiver": "ghost",
            "message": "AbortLoad",
            "reason": "no such actor",
            "count": 1,
        }
        heard: asyncio.Queue[Any] = asyncio.Queue()
        ref.watch(Witness.start(system, "witness", heard))
        assert await heard.get() == ("ghost", "no such actor")

    run_virtual(main())


def test_local_first_then_remote_at_the_time_of_each_send() -> None:
    async def main() -> None:
        system = make_system(ask_timeout_s=7.0)
        ref = system.ref("target")
        remote = FakeDirectory()
        system.remote = remote
        ref.tell(AbortLoad(0, 1, ""))
        assert await ref.ask(ASK, block=False) == "reply"
        ref.watch(ref)
        assert remote.seen == [
            ("target", "tell", AbortLoad(0, 1, "")),
            ("target", "ask", ASK, 7.0),
            ("target", "watch", ref),
        ]
        local = Target.start(system, "target")
        assert (await ref.ask(ASK, block=False)).version == 3
        await local.stop(block=False)
        ref.tell(AbortLoad(0, 2, ""))
        assert remote.seen[3:] == [("target", "tell", AbortLoad(0, 2, ""))]
        assert repr(ref) == "<NamedRef target>"

    run_virtual(main())


def test_names_are_in_the_order_of_start() -> None:
    async def main() -> None:
        system = make_system()
        for name in ("c", "a", "b"):
            Target.start(system, name)
        assert system.names() == ["c", "a", "b"]

    run_virtual(main())


def test_depths_and_facts_of_the_actors_that_live_here() -> None:
    class Talker(Target):
        def status(self) -> dict[str, Any]:
            return {"seen": 3}

    async def main() -> None:
        system = make_system()
        Talker.start(system, "talker")
        target = Target.start(system, "target")
        for version in range(3):
            target.tell(AbortLoad(0, version, ""))
        assert system.depths() == {"talker": 0, "target": 3}
        assert system.facts("talker") == {"seen": 3}
        assert system.facts("target") == {}
        assert system.facts("nobody") == {}
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert system.depths()["target"] == 0

    run_virtual(main())


def test_a_wait_is_in_the_table_until_it_ends_however_it_ends() -> None:
    table = WaitTable()
    outer, inner = Wait("a", "b", "X", 1.0, 2.0), Wait("a", "b", "Y", 1.5, 2.5)

    def work() -> None:
        with table.on(**outer._asdict()):
            with table.on(**inner._asdict()):
                assert table.rows() == [outer, inner]
            assert table.rows() == [outer]
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        work()
    assert table.rows() == []


@pytest.mark.parametrize(
    ("waits", "cycle"),
    [
        ("ab", []),
        ("ab ba", ["a", "b", "a"]),
        ("ab bc cd da", ["a", "b", "c", "d", "a"]),
        ("ab bc cb", []),
        ("ab bc bd cb da", ["a", "b", "d", "a"]),
        ("aa ab", []),
    ],
)
def test_a_cycle_of_waits(waits: str, cycle: list[str]) -> None:
    table = WaitTable()
    for key, (who, on) in enumerate(waits.split()):
        table._rows[key] = Wait(who, on, "X", 0.0, 1.0)
    assert table.cycle("a", "b") == cycle
