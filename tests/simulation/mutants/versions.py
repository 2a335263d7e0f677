"""Faults of versions and staleness: numbers, terms, stamps and what they name."""

from __future__ import annotations

from typing import Any

from tests.simulation.faults import RepeatRequests
from tests.simulation.lives import Delays
from tests.simulation.mutants.base import Patches, mutant
from tests.simulation.ordinary import ordinary
from tests.simulation.trainer_faults import TakeOver

from ratchet.actors.buffer import BufferActor
from ratchet.actors.judging import Judging
from ratchet.actors.publisher import Publisher
from ratchet.actors.role import BUFFER
from ratchet.actors.rollout import RolloutActor
from ratchet.actors.weight_loads import WeightLoads
from ratchet.backends.rollout.fake import FakeEngine
from ratchet.errors import GenerationFailed
from ratchet.messages import BurnVersion, ClaimPrompts, CommitVersion
from ratchet.staleness import Lineage, Position
from ratchet.storage.versions import VersionStore
from ratchet.types import VersionSpan


@mutant(
    "a batch is filtered against V and trained at V+1", world=ordinary(buffer={"max_staleness": 1})
)
def judged_by_the_last_announced() -> Patches:
    original = Judging.purge

    def purge(self: Any, position: Position) -> None:
        original(self, getattr(self, "_announced", Position(0, 0)))

    updated = BufferActor._version_updated

    def version_updated(self: Any, record: Any) -> None:
        self._judging._announced = Position(record.version, record.step)
        updated(self, record)

    return [(Judging, "purge", purge), (BufferActor, "_version_updated", version_updated)]


@mutant("staleness by the difference of version numbers (miles#2244)", seed=25, slow=True)
def difference_of_numbers() -> Patches:
    def staleness(self: Any, version: int, position: Position) -> int:
        return position.version - version + position.step - self.step(position.version)

    return [(Lineage, "staleness", staleness)]


@mutant("a burnt number is used again", seed=13)
def number_used_again() -> Patches:
    def burn(self: Any, version: int, reason: str, now: float) -> None:
        self._sql.execute("DELETE FROM versions WHERE version = ?", (version,))

    return [(VersionStore, "burn", burn)]


@mutant("the version goes up when nothing was sent (trl#5937)", seed=2)
def live_although_nothing_arrived() -> Patches:
    ask = Publisher._ask_registry

    def commit(self: Any, message: Any) -> Any:
        if isinstance(message, BurnVersion):
            message = CommitVersion(message.term, message.version, "nothing")
        return ask(self, message)

    return [(Publisher, "_ask_registry", commit)]


@mutant("the number is reserved after the next batch is asked for (docs/design/0003)", seed=3)
def reserved_after_the_request() -> Patches:
    reserve, transfer = Publisher.reserve, Publisher.transfer

    async def later(self: Any, step: int) -> None:
        if self.version is None or step == self.lineage.step(self.version):
            await reserve(self, step)  # the first one, or the same weights again
        else:
            self._later = step
            self.live = None
            self._decided.clear()

    async def reserve_first(self: Any) -> Any:
        step, self._later = getattr(self, "_later", None), None
        if step is not None:
            async with self.changing():
                await reserve(self, step)
        return await transfer(self)

    def position(self: Any) -> Position:
        step = getattr(self, "_later", None)
        return Position(self.version, self.lineage.step(self.version) if step is None else step)

    return [
        (Publisher, "reserve", later),
        (Publisher, "transfer", reserve_first),
        (Publisher, "position", property(position)),
    ]


@mutant("a recovered engine gets traffic before weights (miles#1724)", seed=2)
def prompts_before_weights() -> Patches:
    start = RolloutActor._start

    async def early(self: Any) -> None:
        await start(self)
        credit, buffer = self._slots.credit, self.life_of(BUFFER)
        claim = ClaimPrompts(self.name, self.role.incarnation, credit, 0, buffer)
        self.system.ref(BUFFER).tell(claim)

    return [(RolloutActor, "_start", early)]


@mutant("the version is read after the await (AReaL#1569)", seed=9, fake=True)
def version_read_after_the_await() -> Patches:
    generate = FakeEngine.generate

    async def stamped_late(self: Any, prompt_ids: Any, params: Any) -> Any:
        completion = await generate(self, prompt_ids, params)
        span = VersionSpan(self._version or 0, 0, len(completion.token_ids))
        return completion._replace(spans=(span,))

    return [(FakeEngine, "generate", stamped_late)]


@mutant("an older trainer's weights are loaded (prime-rl#2219)", seed=10)
def engine_takes_any_term() -> Patches:
    begin = WeightLoads.begin

    def unfenced(self: Any, message: Any) -> Any:
        self._term = self._offered = 0
        return begin(self, message)

    return [(WeightLoads, "begin", unfenced)]


@mutant(
    "an older trainer is given batches (miles#2244)",
    world=ordinary(  # each waits for slow groups while the next one takes over, and asks again
        *(TakeOver(at, "beside") for at in (40.0, 90.0, 140.0)),
        *(RepeatRequests(41.0 + 4 * i, for_s=1.0, times=4) for i in range(40)),
        delays=Delays(step_s=0.5, token_s=10.0),
        rollout={"group_timeout_s": 300.0},
        buffer={"lease_s": 400.0, "max_staleness": 4},
    ),
)
def buffer_serves_any_term() -> Patches:
    take = BufferActor._take_request

    def unfenced(self: Any, message: Any) -> None:
        self._batches.term = 0
        take(self, message)

    return [(BufferActor, "_take_request", unfenced)]


@mutant("a second trainer counts from 0 with its own counter (miles#2244)", seed=11)
def own_counter() -> Patches:
    insert = (
        "INSERT OR REPLACE INTO versions (version, term, step, parent, state, created_at)"
        " VALUES (?, ?, ?, ?, 'reserved', ?)"
    )

    def reserve(self: Any, term: int, step: int, parent: int | None, now: float) -> int:
        mine = self._sql.execute("SELECT count(*) FROM versions WHERE term = ?", (term,))
        version: int = mine.fetchone()[0]
        before = parent if parent is not None and parent < version else None
        self._sql.execute(insert, (version, term, step, before, now))
        return version

    return [(VersionStore, "reserve", reserve)]


@mutant("a publish aborts the generations in flight (miles#2372)", seed=430, fake=True)
def publish_aborts() -> Patches:
    pause = FakeEngine.pause

    async def abort(self: Any, mode: Any) -> None:
        for future in self._in_flight:
            if not future.done():
                future.set_exception(GenerationFailed("aborted"))
        await pause(self, mode)

    return [(FakeEngine, "pause", abort)]
