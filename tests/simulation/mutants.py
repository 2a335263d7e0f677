"""Faults of others, put back into our actors one at a time: some world must catch each.

A mutant is a small patch of one method and the line of the list of faults that it stands for;
`seed` is a world that catches it, found by trying worlds from 0 on. Where the line is about a part
that the simulation replaces by a fake (an engine, a receiver), the fake is patched, which proves
that the invariant can fail, not that the real part is right: those are marked `fake`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import msgspec
from tests.simulation.weights import FakeReceiver, digest_of

from ratchet.actors.buffer import BufferActor
from ratchet.actors.generation import Generator
from ratchet.actors.group_table import GroupTable
from ratchet.actors.known_versions import KnownVersions
from ratchet.actors.prompt_source import PromptSource
from ratchet.actors.publisher import Publisher
from ratchet.actors.rollout import RolloutActor
from ratchet.actors.trainer import TrainerActor
from ratchet.backends.rollout.fake import NAME, FakeEngine
from ratchet.errors import RewardFailed, WeightsMismatch
from ratchet.messages import BurnVersion, ClaimPrompts, CommitVersion
from ratchet.staleness import Lineage, Position
from ratchet.storage.versions import VersionStore
from ratchet.types import VersionSpan

Patches = list[tuple[type, str, Any]]


@dataclass(frozen=True)
class Mutant:
    """One fault put back."""

    line: str
    """the line of the list that it stands for"""
    patches: Callable[[], Patches]
    seed: int | None
    """of a world that catches it; None if none of the first 60 does"""
    fake: bool = False


MUTANTS: dict[str, Mutant] = {}


def mutant(line: str, *, seed: int | None, fake: bool = False) -> Callable[[Any], Any]:
    """Register a function that returns the patches."""

    def register(make: Callable[[], Patches]) -> Callable[[], Patches]:
        MUTANTS[make.__name__] = Mutant(line, make, seed, fake)
        return make

    return register


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Put a fault back, for as long as the block lasts."""
    with ExitStack() as stack:
        for owner, attribute, value in MUTANTS[name].patches() if name else []:
            stack.enter_context(patch.object(owner, attribute, value))
        yield


# --- versions and staleness


@mutant("a batch is filtered against V and trained at V+1", seed=1)
def judged_by_the_last_announced() -> Patches:
    original = BufferActor._judge

    def judge(self: Any, entry: Any, position: Position) -> None:
        announced = getattr(self, "_announced", Position(0, 0))
        original(self, entry, announced)

    updated = BufferActor._version_updated

    def version_updated(self: Any, record: Any) -> None:
        self._announced = Position(record.version, record.step)
        updated(self, record)

    return [(BufferActor, "_judge", judge), (BufferActor, "_version_updated", version_updated)]


@mutant("staleness by the difference of version numbers (miles#2244)", seed=None)
def difference_of_numbers() -> Patches:
    def staleness(self: Any, version: int, position: Position) -> int:
        return position.version - version + position.step - self.step(position.version)

    return [(Lineage, "staleness", staleness)]


@mutant("a burnt number is used again", seed=0)
def number_used_again() -> Patches:
    def burn(self: Any, version: int, reason: str, now: float) -> None:
        self._sql.execute("DELETE FROM versions WHERE version = ?", (version,))

    return [(VersionStore, "burn", burn)]


@mutant("the version goes up when nothing was sent (trl#5937)", seed=0)
def live_although_nothing_arrived() -> Patches:
    ask = Publisher._ask_registry

    def commit(self: Any, message: Any) -> Any:
        if isinstance(message, BurnVersion):
            message = CommitVersion(message.term, message.version, "nothing")
        return ask(self, message)

    return [(Publisher, "_ask_registry", commit)]


@mutant("the number is reserved after the next batch is asked for (docs/design/0003)", seed=0)
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


@mutant("a recovered engine gets traffic before weights (miles#1724)", seed=0)
def prompts_before_weights() -> Patches:
    start = RolloutActor._start

    async def early(self: Any) -> None:
        await start(self)
        claim = ClaimPrompts(self.name, self.role.incarnation, self._slots)
        self.system.ref("buffer").tell(claim)

    return [(RolloutActor, "_start", early)]


@mutant("the version is read after the await (AReaL#1569)", seed=0, fake=True)
def version_read_after_the_await() -> Patches:
    generate = FakeEngine.generate

    async def stamped_late(self: Any, prompt_ids: Any, params: Any) -> Any:
        completion = await generate(self, prompt_ids, params)
        span = VersionSpan(self._version or 0, 0, len(completion.token_ids))
        return completion._replace(spans=(span,))

    return [(FakeEngine, "generate", stamped_late)]


@mutant("a failed write is swallowed and the version stamped (miles p2p)", seed=2, fake=True)
def stamped_without_a_digest() -> Patches:
    async def load(
        self: Any, weights: Any, digest: str, manifest: Any, sink: Any, mode: Any
    ) -> Any:
        return await original(self, weights, digest_of(weights), manifest, sink, mode)

    original = FakeReceiver._load
    return [(FakeReceiver, "_load", load)]


@mutant("the version is stamped, then the digest is looked at", seed=2, fake=True)
def stamped_before_the_digest() -> Patches:
    original = FakeReceiver._load

    async def load(
        self: Any, weights: Any, digest: str, manifest: Any, sink: Any, mode: Any
    ) -> Any:
        report = await original(self, weights, digest_of(weights), manifest, sink, mode)
        if report.digest != digest:
            raise WeightsMismatch("too late")
        return report

    return [(FakeReceiver, "_load", load)]


@mutant("an older trainer's weights are loaded (prime-rl#2219)", seed=25)
def engine_takes_any_term() -> Patches:
    load = RolloutActor._load_weights

    def unfenced(self: Any, message: Any) -> Any:
        self._term = self._offered = 0
        return load(self, message)

    return [(RolloutActor, "_load_weights", unfenced)]


@mutant("an older trainer is given batches (miles#2244)", seed=None)
def buffer_serves_any_term() -> Patches:
    take = BufferActor._take_request

    def unfenced(self: Any, message: Any) -> None:
        self._term = 0
        take(self, message)

    return [(BufferActor, "_take_request", unfenced)]


# --- hangs


@mutant("a lease never ends (SkyRL#1173)", seed=25)
def lease_never_ends() -> Patches:
    return [(BufferActor, "_arm_leases", lambda self: None)]


@mutant("a failure gives no credit back (SkyRL#1173)", seed=1)
def credit_lost() -> Patches:
    def claim(self: Any) -> None:
        if self._engine.version is not None:
            credit = self._slots + self._finished
            message = ClaimPrompts(self.name, self.role.incarnation, credit)
            self.system.ref("buffer").tell(message)

    return [(RolloutActor, "_claim", claim)]


@mutant("an engine stays paused after a failed load (trl#6796)", seed=None, fake=True)
def paused_after_a_failed_load() -> Patches:
    async def load(
        self: Any, weights: Any, digest: str, manifest: Any, sink: Any, mode: Any
    ) -> Any:
        if digest_of(weights) == digest:
            return await original(self, weights, digest, manifest, sink, mode)
        await sink.pause(mode)
        await sink.write({NAME: weights})
        raise WeightsMismatch("and nobody resumes")

    original = FakeReceiver._load
    return [(FakeReceiver, "_load", load)]


@mutant("a late engine is never offered the live version", seed=0)
def nobody_catches_up() -> Patches:
    async def sync(self: Any, engine: Any) -> None:
        return

    return [(TrainerActor, "_sync", sync)]


# --- loss and repetition


@mutant("a finish that waits for a version is forgotten", seed=11)
def parked_finish_forgotten() -> Patches:
    answered = KnownVersions.answered

    def forget(self: Any, asked: Any, records: Any) -> list[Any]:
        answered(self, asked, records)
        return []

    return [(KnownVersions, "answered", forget)]


@mutant("a late finish is accepted", seed=24)
def late_finish_accepted() -> Patches:
    def claimed(self: Any, worker: str, incarnation: str, group_id: int, attempt: int) -> Any:
        return self._in_flight.get(group_id)

    return [(GroupTable, "claimed", claimed)]


@mutant("hard prompts are recycled for ever (miles#2030)", seed=0)
def retried_for_ever() -> Patches:
    return [(GroupTable, "unused", lambda self, entry, reason: self._again(entry, reason))]


@mutant("capacity does not count the groups in flight", seed=0)
def capacity_of_the_queue_only() -> Patches:
    return [(GroupTable, "num_open", property(lambda self: self.num_queued))]


@mutant("surplus finished groups are dropped without a word (slime#2238)", seed=1)
def surplus_dropped() -> Patches:
    batch = GroupTable.batch

    def and_forget(self: Any, entries: Any, step: int) -> Any:
        groups = batch(self, entries, step)
        self._queued.clear()
        return groups

    return [(GroupTable, "batch", and_forget)]


@mutant("a prompt comes twice in an epoch (OpenRLHF#1322)", seed=1)
def prompt_twice() -> Patches:
    following = PromptSource.next

    def again(self: Any) -> Any:
        if self.position == 2 and not getattr(self, "_again", False):
            self._again = True
            self.position = 1
        return following(self)

    return [(PromptSource, "next", again)]


@mutant("a lost reply trains a group twice (miles#1334)", seed=None)
def any_batch_is_trained() -> Patches:
    return [(TrainerActor, "_batch_ready", lambda self, ready: self._end_wait(ready))]


# --- numbers and rewards


@mutant("a step that is not finite is published (prime-rl#2084)", seed=3)
def non_finite_step_published() -> Patches:
    optimise = TrainerActor._optimise

    async def publish(self: Any, groups: Any, times: Any) -> Any:
        applied, reports = await optimise(self, groups, times)
        if not applied:
            self._step += 1
            async with self._publisher.changing():
                await self._publisher.reserve(self._step)
        return True, reports

    return [(TrainerActor, "_optimise", publish)]


@mutant("the same seed for different samples of a group (ms-swift#7858)", seed=0)
def one_seed_for_a_group() -> Patches:
    complete = Generator._complete

    async def same(self: Any, prompt: Any, seeds: Any, temperature: float) -> Any:
        return await complete(self, prompt, [seeds[0]] * len(seeds), temperature)

    generate = Generator._generate_group

    async def group(self: Any, assignment: Any) -> Any:
        made = await generate(self, assignment)
        seed = made.rollouts[0].seed
        rollouts = tuple(msgspec.structs.replace(r, seed=seed) for r in made.rollouts)
        return msgspec.structs.replace(made, rollouts=rollouts)

    return [(Generator, "_complete", same), (Generator, "_generate_group", group)]


@mutant("failures are trained as zero reward (NeMo-RL#3470)", seed=40)
def failure_is_zero() -> Patches:
    score = Generator._score

    async def zero(self: Any, prompt: Any, completions: Any) -> Any:
        try:
            return await score(self, prompt, completions)
        except RewardFailed:
            return [0.0] * len(completions)

    return [(Generator, "_score", zero)]
