"""Faults of weight transfers, put back into the product's own transport and its two ends."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any

from tests.simulation.lives import Delays
from tests.simulation.mutants.base import Patches, mutant
from tests.simulation.ordinary import ordinary
from tests.simulation.weight_ends import RecordingSender

from ratchet.actors import transfer
from ratchet.actors.publisher import Publisher
from ratchet.actors.weight_loads import WeightLoads
from ratchet.actors.weight_sync import WeightSync
from ratchet.backends.rollout.fake import FakeEngine
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.messages import WeightsLoaded
from ratchet.transport.weights import finalize, receiver
from ratchet.transport.weights.digest import check_trailer, make_trailer
from ratchet.transport.weights.lane import Lane
from ratchet.transport.weights.link import Link

_Load: Any = finalize._Load


class _Arrivals:
    """Says that what arrived is what was sent."""

    def __init__(self, load: Any) -> None:
        self._load = load
        self._arrivals = load._arrivals
        self.trailer_of_sender = b""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._arrivals, name)

    async def trailer(self) -> bytes:
        self.trailer_of_sender = await self._arrivals.trailer()
        return make_trailer(self._load._manifest, self._load._digests)


@mutant("weights are stamped without a look at their digest (miles p2p)", seed=3)
def stamped_without_a_digest() -> Patches:
    run = _Load.run

    async def blindly(self: Any, *args: Any, **options: Any) -> Any:
        self._arrivals = _Arrivals(self)
        return await run(self, *args, **options)

    return [(_Load, "run", blindly)]


@mutant("the version is stamped, then the digest is looked at", seed=3)
def stamped_before_the_digest() -> Patches:
    run = _Load.run

    async def early(self: Any, *args: Any, **options: Any) -> Any:
        self._arrivals = arrivals = _Arrivals(self)
        report = await run(self, *args, **options)
        check_trailer(self._manifest, arrivals.trailer_of_sender, self._digests)
        return report

    return [(_Load, "run", early)]


@mutant("a failed write is swallowed, and the version stamped (miles p2p)", seed=16)
def failed_write_swallowed() -> Patches:
    write = _Load._write

    async def deaf(self: Any) -> None:
        arrived, _ = self._staged[0]
        try:
            await write(self)
        except WeightsMismatch:
            self._arrivals.release(arrived)

    return [(_Load, "_write", deaf)]


@mutant("a load that failed is reported as loaded", seed=2)
def failure_reported_as_loaded() -> Patches:
    receive = WeightLoads._receive

    async def fine(self: Any, message: Any, previous: Any) -> Any:
        try:
            return await receive(self, message, previous)
        except (TransferFailed, WeightsMismatch):
            return WeightsLoaded(self._role.name, message.manifest.version, "", 0.0, 0.0, 0.0)

    return [(WeightLoads, "_receive", fine)]


@mutant("what the engine holds is not read back", seed=3)
def never_read_back() -> Patches:
    run = _Load.run

    async def trusting(self: Any, mode: Any, *, verify: bool, commit: Any) -> Any:
        return await run(self, mode, verify=False, commit=commit)

    return [(_Load, "run", trusting)]


@mutant("an engine stays paused after a failed load (trl#6796)", seed=3)
def paused_after_a_failed_load() -> Patches:
    resume = finalize._resume

    async def only_with_a_version(sink: Any) -> None:
        if sink.version is not None:
            await resume(sink)

    return [(finalize, "_resume", only_with_a_version)]


@mutant("an engine generates between two buckets", seed=3, fake=True)
def not_quarantined() -> Patches:
    change = FakeEngine._change

    def keeps(self: Any, **state: Any) -> None:
        if state == {"version": None} and not self._closed:
            state = {}
        change(self, **state)

    return [(FakeEngine, "_change", keeps)]


@mutant("the memory that an engine has adopted is received into again", seed=3)
def adopted_memory_used_again() -> Patches:
    return [(Link, "hand_over", lambda self: lambda: None)]


class _Any(int):
    """Whichever part is asked for."""

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


class _Greedy:
    """An inbox that takes whatever comes."""

    def __init__(self, inbox: Any) -> None:
        self._inbox = inbox

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inbox, name)
        return _Any(value) if name == "has" else value


@mutant("a bucket that came before the break is taken again", seed=29)
def bucket_taken_twice() -> Patches:
    receive_round = receiver.receive_round

    def greedy(link: Any, group: Any, manifest: Any, inbox: Any, *args: Any) -> None:
        receive_round(link, group, manifest, _Greedy(inbox), *args)

    return [(receiver, "receive_round", greedy)]


@mutant("after a break the slowest engine's buckets are skipped", seed=29)
def bucket_skipped() -> Patches:
    enter = Lane._enter
    serve = Lane._serve

    def ahead(self: Any, came: Any) -> None:
        first = max(ready.has for ready in came.values())
        served = {rank: ready for rank, ready in came.items() if ready.has == first}
        self._late = {rank: ready for rank, ready in came.items() if ready.has < first}
        serve(self, served)

    def together(self: Any, came: Any, first: int) -> Any:
        return enter(self, came | self._late, first)

    return [(Lane, "_serve", ahead), (Lane, "_enter", together)]


@mutant("an engine that was lost still counts as a holder", seed=3)
def lost_engine_holds() -> Patches:
    judge = transfer._judge

    def kindly(planned: Any, loads: Any, sent: Any, lost: Any) -> Any:
        loaded, failed = judge(planned, loads, sent, lost)
        if loaded:
            report = next(iter(loaded.values()))
            loaded |= dict.fromkeys(failed, report)
            failed = {}
        return loaded, failed

    return [(transfer, "_judge", kindly)]


@mutant(
    "a step changes the weights while they are read",
    world=ordinary(  # the next batch is there already, and its step ends before the first bucket
        delays=Delays(step_s=0.1, move_s=2.0, token_s=0.05),
        buffer={"max_staleness": 4, "capacity_factor": 4.0},
    ),
)
def weights_change_while_they_are_read() -> Patches:
    @asynccontextmanager
    async def at_once(self: Any) -> Any:
        yield

    async def at_all_times(self: Any) -> None:
        return

    return [(Publisher, "changing", at_once), (WeightSync, "transferred", at_all_times)]


@mutant("weights are never delivered, and it looks like staleness (verl#7495)", seed=2)
def first_weights_for_ever() -> Patches:
    send = RecordingSender.send

    async def again(self: Any, manifest: Any) -> Any:
        read = self._source.read
        kept = self.__dict__.setdefault("_kept", {})
        self._source.read = lambda names: [
            kept.setdefault(name, tensor.clone())
            for name, tensor in zip(names, read(names), strict=True)
        ]
        try:
            return await send(self, manifest)
        finally:
            del self._source.read

    return [(RecordingSender, "send", again)]
