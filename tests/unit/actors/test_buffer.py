from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.actors import make_system
from tests.helpers.config import small_config
from tests.helpers.refs import RecordedDirectory, RecordedRef
from tests.helpers.samples import sample, trained_tokens, user_code
from tests.simulation.loop import run_virtual

from ratchet.actors.buffer import BufferActor
from ratchet.messages import (
    BatchReady,
    ClaimPrompts,
    DescribeLineage,
    GroupFailed,
    GroupFinished,
    LineageDescribed,
    Message,
    PromptsClaimed,
    RegisterRole,
    RequestBatch,
    RoleLeft,
    RoleRegistered,
    StepTrained,
    VersionUpdated,
)
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.payloads import Payloads
from ratchet.types import (
    Assignment,
    Packed,
    Prompt,
    RoleInfo,
    Rollout,
    RolloutGroup,
    RolloutStats,
    VersionRecord,
    VersionSpan,
)

WORKER = RoleInfo("rollout", "rollout-0", "w1")
LEASE_S = 10.0


def record(version: int, step: int | None = None, parent: int | None = None) -> VersionRecord:
    if parent is None and version > 0:
        parent = version - 1
    return VersionRecord(version, 1, version if step is None else step, parent, "live", "d")


class World:
    """A buffer, and the others as recorders."""

    def __init__(
        self,
        *,
        versions: int = 1,
        num_prompts: int = 100,
        prompts: Sequence[Prompt] | None = None,
        directory: Path | None = None,
        **sections: Any,
    ) -> None:
        buffer = {"batch_groups": 2, "lease_s": LEASE_S, "max_staleness": 1}
        sections["buffer"] = buffer | sections.get("buffer", {})
        sections["rollout"] = {"max_tokens": 5, "group_size": 2, "group_timeout_s": LEASE_S}
        self.config = small_config(**sections)
        self.others = RecordedDirectory()
        self.records = [record(v) for v in range(versions)]
        registry = self.others.ref("registry")
        registry.answer = self._registry
        self.system = make_system(remote=self.others)
        self.ledger = GroupLedger.open(None if directory is None else directory / "ledger.sqlite")
        self.ref = BufferActor.start(
            self.system,
            RoleInfo("buffer", "buffer", "b1"),
            config=self.config,
            prompts=prompts or [Prompt(f"p{i}", f"{i}>") for i in range(num_prompts)],
            ledger=self.ledger,
            payloads=None if directory is None else Payloads(directory / "payloads"),
        )

    def _registry(self, message: Message) -> Message:
        if isinstance(message, RegisterRole):
            return RoleRegistered((), tuple(self.records))
        assert isinstance(message, DescribeLineage)
        known = {r.version: r for r in self.records}
        return LineageDescribed(tuple(known[v] for v in message.versions if v in known))

    @property
    def worker(self) -> RecordedRef:
        return self.others.ref("rollout-0")

    @property
    def trainer(self) -> RecordedRef:
        return self.others.ref("trainer-0")

    async def tell(self, *messages: Message) -> None:
        for message in messages:
            self.ref.tell(message)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def claim(self, credit: int, version: int = 0) -> list[Assignment]:
        seen = len(self.assignments)
        await self.tell(ClaimPrompts("rollout-0", "w1", credit, version, "b1"))
        return self.assignments[seen:]

    @property
    def assignments(self) -> list[Assignment]:
        return [a for m in self.worker.of(PromptsClaimed) for a in m.assignments]

    @property
    def batches(self) -> list[BatchReady]:
        return self.trainer.of(BatchReady)

    async def finish(self, assignment: Assignment, version: int = 0, **kwargs: Any) -> None:
        await self.tell(finished(assignment, version, **kwargs))

    async def request(self, version: int = 0, step: int | None = None, term: int = 1) -> None:
        step = version if step is None else step
        await self.tell(RequestBatch("trainer-0", term, version, step, None, "b1"))


def finished(
    assignment: Assignment,
    version: int,
    rewards: tuple[float, ...] = (0.0, 1.0),
    rollouts: tuple[Rollout, ...] | None = None,
) -> GroupFinished:
    def rollout(reward: float) -> Rollout:
        return Rollout(
            Packed.of([3], "int32"),
            Packed.of([4, 1], "int32"),
            Packed.of([-1.0, -1.0], "float32"),
            Packed.of([1, 1], "uint8"),
            (VersionSpan(version, 0, 2),),
            "stop",
            reward,
            0,
        )

    group = RolloutGroup(
        assignment.group_id,
        assignment.attempt,
        assignment.prompt.prompt_id,
        assignment.epoch,
        tuple(rollout(reward) for reward in rewards) if rollouts is None else rollouts,
    )
    return GroupFinished("rollout-0", "w1", group, RolloutStats("rollout-0", "w1"))


def failed(assignment: Assignment, reason: str = "reward") -> GroupFailed:
    stats = RolloutStats("rollout-0", "w1")
    return GroupFailed(
        "rollout-0", "w1", assignment.group_id, assignment.attempt, reason, "why", stats
    )


def scenario(body: Callable[[World], Awaitable[None]], **kwargs: Any) -> None:
    async def main() -> None:
        world = World(**kwargs)
        await world.settle()
        await body(world)
        assert world.ref.is_alive(), world.system.log.events
        await world.ref.stop(block=False)

    run_virtual(main())


def ids(ready: BatchReady) -> list[int]:
    return [group.group_id for group in ready.batch.groups]


def test_prompts_go_out_up_to_credit_and_capacity() -> None:
    async def body(world: World) -> None:
        assert len(await world.claim(3)) == 3
        assert len(await world.claim(10)) == 1  # capacity 2 x 2
        assert [a.group_id for a in world.assignments] == [0, 1, 2, 3]
        assert all(a.lease_s == LEASE_S and a.group_size == 2 for a in world.assignments)

    scenario(body)


def test_a_batch_is_first_in_first_out_by_finish_and_frees_its_room() -> None:
    async def body(world: World) -> None:
        a, b, c, d = await world.claim(10)
        for assignment in (d, b, a):
            await world.finish(assignment)
        assert world.batches == []
        assert len(world.assignments) == 4
        await world.request()
        (ready,) = world.batches
        assert ids(ready) == [3, 1]
        assert (ready.batch.step, ready.term) == (1, 1)
        assert ready.stats.queue_groups == 1
        assert len(world.assignments) == 6
        await world.finish(c)
        assert world.ledger.counts()["batched"] == 2

    scenario(body)


def test_a_request_waits_for_the_last_finish() -> None:
    async def body(world: World) -> None:
        a, b, *_ = await world.claim(4)
        await world.request()
        await world.finish(a)
        assert world.batches == []
        await world.finish(b)
        assert ids(world.batches[0]) == [0, 1]

    scenario(body)


def test_the_same_request_gets_the_same_batch() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(4):
            await world.finish(assignment)
        await world.request()
        await world.request()
        first, again = world.batches
        assert first == again
        assert world.ledger.counts()["finished"] == 2

    scenario(body)


def test_stale_groups_are_dropped_at_get_and_counted() -> None:
    async def body(world: World) -> None:
        a, b, c, d = await world.claim(4)
        await world.finish(a, version=0)
        await world.finish(b, version=1)
        await world.finish(c, version=2)
        await world.request(version=2)  # staleness 2, 1 and 0; the bound is 1
        (ready,) = world.batches
        assert ids(ready) == [1, 2]
        assert ready.stats.staleness == (1, 0)
        assert ready.stats.dropped == {"stale": 1}
        assert world.ledger.reasons() == {"stale": 1}
        await world.finish(d, version=2)

    scenario(body, versions=3)


def test_a_step_taken_but_not_published_counts() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(4):
            await world.finish(assignment, version=1)
        await world.request(version=1, step=3)  # two steps ahead of the version
        assert world.batches == []
        assert world.ledger.reasons() == {"stale": 4}

    scenario(body, versions=2)


def test_stale_groups_leave_when_the_version_changes() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(10):
            await world.finish(assignment, version=0)
        assert len(world.assignments) == 4
        await world.tell(VersionUpdated(record(1)))
        assert len(world.assignments) == 4
        await world.tell(VersionUpdated(record(2)))
        assert len(world.assignments) == 8
        assert world.ledger.reasons() == {"stale": 4}

    scenario(body)


def test_late_news_of_an_older_version_judges_nothing() -> None:
    async def body(world: World) -> None:
        (a,) = await world.claim(1)
        await world.tell(VersionUpdated(record(2)))
        await world.finish(a, version=2)
        await world.tell(VersionUpdated(record(0)))  # two steps away, and the bound is 1
        assert world.ledger.counts()["finished"] == 1

    scenario(body, versions=3)


def test_a_version_never_heard_of_is_asked_for_before_it_is_judged() -> None:
    async def body(world: World) -> None:
        world.records += [record(1), record(2)]  # reserved; their events have not arrived
        a, b, *_ = await world.claim(4)
        await world.finish(a, version=2)
        await world.finish(b, version=2)
        await world.request(version=2)
        assert ids(world.batches[0]) == [0, 1]
        asked = world.others.ref("registry").of(DescribeLineage)
        assert sorted(v for m in asked for v in m.versions) == [1, 2]

    scenario(body)


def test_a_version_that_was_never_reserved_stops_the_buffer() -> None:
    async def main() -> None:
        world = World()
        await world.settle()
        (a,) = await world.claim(1)
        await world.finish(a, version=9)
        await world.settle()
        assert not world.ref.is_alive()
        (failure,) = world.system.log.named("actor_failed")
        assert "never reserved" in failure["reason"]

    run_virtual(main())


def test_failures_are_dropped_or_retried_within_their_budget() -> None:
    async def drop(world: World) -> None:
        (a,) = await world.claim(1)
        await world.tell(failed(a))
        assert world.ledger.reasons() == {"reward": 1}

    async def retry(world: World) -> None:
        (a,) = await world.claim(1)
        await world.tell(failed(a))
        (again,) = await world.claim(2)
        assert (again.group_id, again.attempt, again.prompt) == (0, 1, a.prompt)
        await world.tell(failed(again))
        assert world.ledger.reasons() == {"reward": 1}
        (other,) = await world.claim(3)
        assert other.group_id == 1

    scenario(drop)
    scenario(retry, buffer={"unused": "retry", "max_retries": 1})


def test_a_group_without_spread_is_filtered_not_retried() -> None:
    async def body(world: World) -> None:
        a, b = await world.claim(2)
        await world.finish(a, rewards=(1.0, 1.0))
        await world.finish(b)
        assert world.ledger.reasons() == {"filter:zero_spread": 1}
        assert world.ledger.counts()["finished"] == 1

    scenario(body, buffer={"filters": ["zero_spread"], "unused": "retry"})


def test_what_the_batch_filter_rejects_is_not_retried_and_what_was_not_finite_is() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(4):
            await world.finish(assignment)
        await world.request()
        await world.tell(StepTrained(1, 1, (), {0: "filter:batch", 1: "non_finite"}))
        assert world.ledger.reasons() == {"filter:batch": 1}
        (again,) = await world.claim(5)
        assert (again.group_id, again.attempt) == (1, 1)

    scenario(body, buffer={"unused": "retry", "capacity_factor": 1.5})


def test_of_an_aborted_group_the_whole_rollouts_are_trained_or_nothing() -> None:
    mixed = (sample(1.0), sample(0.5, finish="abort"))
    nothing = (sample(0.5, finish="abort", length=0), sample(0.5, finish="error"))

    async def mask(world: World) -> None:
        a, b, c = await world.claim(3)
        await world.finish(a, rollouts=mixed)
        await world.finish(b, rollouts=nothing)
        assert world.ledger.reasons() == {"aborted": 1}
        await world.finish(c)
        await world.request()
        (ready,) = world.batches
        assert [trained_tokens(group) for group in ready.batch.groups] == [[2, 0], [2, 2]]
        assert ready.stats.masked == {"aborted": 1}
        assert ready.stats.offered.rewards.histogram == {1.0: 2, 0.0: 1}
        row = world.ledger.group(0)
        assert row is not None
        assert (row.reward_mean, row.reason) == (1.0, "aborted")

    async def drop(world: World) -> None:
        for rollouts, assignment in zip([mixed, nothing], await world.claim(2), strict=True):
            await world.finish(assignment, rollouts=rollouts)
        assert world.ledger.reasons() == {"aborted": 2}

    scenario(mask, buffer={"unused": "mask"})
    scenario(drop)


def test_a_masked_group_waits_until_nothing_of_it_is_fresh() -> None:
    async def body(world: World) -> None:
        a, b, c = await world.claim(3)
        await world.finish(a, rollouts=(sample(0.0, 0, 1), sample(1.0, 1)))
        await world.finish(b, version=0)
        await world.tell(VersionUpdated(record(2)))  # the bound is 1
        assert world.ledger.reasons() == {"stale": 1}
        (masked,) = world.ledger.groups("finished")
        assert (masked.group_id, masked.reason) == (a.group_id, "stale")
        await world.tell(RequestBatch("trainer-0", 1, 2, 2, None, "b1"))
        await world.finish(c, version=2)
        (ready,) = world.batches
        assert ids(ready) == [0, 2]
        assert ready.stats.staleness == (1, 0)  # of what is trained
        assert ready.stats.masked == {"stale": 1}
        events = [event.event for event in world.ledger.events(0)]
        assert events == ["issued", "claimed", "finished", "masked", "batched"]

    async def too_old(world: World) -> None:
        (a,) = await world.claim(1)
        await world.finish(a, rollouts=(sample(0.0, 0, 1), sample(1.0, 1)))
        for version in (2, 3):
            assert world.ledger.reasons() == {}
            await world.tell(VersionUpdated(record(version)))
        assert world.ledger.reasons() == {"stale": 1}
        assert len(world.system.log.named("group_stale")) == 2

    scenario(body, versions=2, buffer={"unused": "mask"})
    scenario(too_old, versions=2, buffer={"unused": "mask"})


def test_code_of_the_user_that_fails_ends_the_buffer_with_its_name(tmp_path: Path) -> None:
    async def main() -> None:
        name = user_code(tmp_path, "return x.nothing")
        world = World(buffer={"filters": [name]})
        await world.settle()
        (a,) = await world.claim(1)
        await world.finish(a)
        assert not world.ref.is_alive()
        (failure,) = world.system.log.named("actor_failed")
        assert name in failure["reason"]
        assert "nothing" in failure["reason"]

    run_virtual(main())


def test_a_lease_ends_and_the_prompt_is_issued_again() -> None:
    async def body(world: World) -> None:
        a, b = await world.claim(2)
        await asyncio.sleep(LEASE_S / 2)
        (c,) = await world.claim(3)
        await world.finish(b)
        await asyncio.sleep(LEASE_S / 2 + 1)
        again = world.assignments[-1]  # the credit came back with the lease
        assert (again.group_id, again.attempt) == (a.group_id, 1)
        assert await world.claim(3) == []
        assert [e["group"] for e in world.system.log.named("lease_expired")] == [a.group_id]
        await world.finish(a)  # too late: its second attempt is under way
        assert world.system.log.named("late_finish")[0]["attempt"] == 0
        assert await world.claim(4) == []  # its credit was spent again
        await world.finish(again)
        await world.finish(c)
        await world.request()
        assert ids(world.batches[0]) == [b.group_id, again.group_id]
        assert world.batches[0].stats.reissued == {"lease_expired": 1}

    scenario(body)


def test_a_worker_that_dies_loses_its_leases_at_once() -> None:
    async def body(world: World) -> None:
        first = await world.claim(3)
        await world.finish(first[0])
        await world.tell(RoleLeft(WORKER, "killed"))
        assert [e["group"] for e in world.system.log.named("lease_ended")] == [1, 2]
        await world.tell(ClaimPrompts("rollout-0", "w2", 2, 0, "b1"))
        last = world.worker.of(PromptsClaimed)[-1]
        assert last.incarnation == "w2"
        assert [(a.group_id, a.attempt) for a in last.assignments] == [(1, 1), (2, 1)]

    scenario(body)


def test_a_prompt_that_kills_its_workers_is_given_up() -> None:
    async def body(world: World) -> None:
        for life in range(3):
            await world.tell(ClaimPrompts("rollout-0", f"w{life}", 1, 0, "b1"))
            await world.tell(RoleLeft(RoleInfo("rollout", "rollout-0", f"w{life}"), "killed"))
        assert world.ledger.reasons() == {"worker_died": 1}

    scenario(body, buffer={"max_reissues": 2})


def test_trained_and_rejected_groups_are_accounted_for() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(2):
            await world.finish(assignment)
        await world.request()
        await world.tell(StepTrained(1, 1, (0,), {1: "stale"}))
        counts = world.ledger.counts()
        assert (counts["trained"], counts["dropped"]) == (1, 1)

    scenario(body)


def test_the_account_of_an_earlier_attempt_does_not_settle_the_next_one() -> None:
    """A step that was skipped is taken again: with the same groups, where there are no others."""

    async def body(world: World) -> None:
        for assignment in await world.claim(2):
            await world.finish(assignment)
        await world.request()
        skipped = StepTrained(1, 1, (), {0: "non_finite", 1: "non_finite"}, {0: 0, 1: 0})
        await world.tell(skipped)
        for assignment in await world.claim(4):
            await world.finish(assignment)
        await world.request()
        await world.tell(RequestBatch("trainer-0", 1, 0, 0, skipped, "b1"))  # again
        await world.tell(skipped)
        assert world.ledger.counts()["batched"] == 2
        await world.tell(StepTrained(1, 1, (0, 1), {}, {0: 1, 1: 1}))
        assert world.ledger.counts()["trained"] == 2

    scenario(body, buffer={"unused": "retry"})


def test_an_older_trainer_is_fenced_and_a_newer_one_takes_over() -> None:
    async def body(world: World) -> None:
        for assignment in await world.claim(4):
            await world.finish(assignment)
        await world.request(term=2)
        await world.request(term=1)
        assert len(world.batches) == 1
        await world.tell(StepTrained(1, 1, (0, 1), {}))  # the zombie's
        assert world.ledger.counts()["trained"] == 0
        await world.request(term=3)
        assert ids(world.batches[1]) == [2, 3]
        (again, other) = await world.claim(6)
        assert [(a.group_id, a.attempt) for a in (again, other)] == [(0, 1), (1, 1)]

    scenario(body)


def test_a_request_waits_for_the_registrys_word_on_the_terms_there_are() -> None:
    """A new life of the buffer would settle a zombie's, and take back what the leader trained."""

    async def main() -> None:
        world = World()
        world.records = [VersionRecord(0, 3, 0, None, "live")]
        for term in (1, 3):  # before anything else
            world.ref.tell(RequestBatch(f"trainer-{term}", term, 0, 0, None, "b1"))
        await world.settle()
        assert [e["term"] for e in world.system.log.named("request_fenced")] == [1]
        for assignment in await world.claim(2):
            await world.finish(assignment)
        assert len(world.others.ref("trainer-3").of(BatchReady)) == 1
        assert world.others.ref("trainer-1").told == []
        await world.ref.stop(block=False)

    run_virtual(main())


def test_an_older_trainer_is_fenced_between_two_batches_too() -> None:
    async def body(world: World) -> None:
        assignments = await world.claim(4)
        for assignment in assignments[:2]:
            await world.finish(assignment)
        await world.request(term=2)
        await world.tell(StepTrained(2, 1, (0, 1), {}))
        await world.tell(RequestBatch("trainer-0", 2, 0, 1, None, "b1"))  # waits for two
        await world.request(term=1)  # the zombie's
        for assignment in assignments[2:]:
            await world.finish(assignment)
        assert [(ready.term, ready.batch.step) for ready in world.batches] == [(2, 1), (2, 2)]
        (fenced,) = world.system.log.named("request_fenced")
        assert (fenced["term"], fenced["newer"]) == (1, 2)

    scenario(body)


def test_a_request_that_waits_is_fenced_by_a_version_of_a_newer_term() -> None:
    """The newer trainer has published, and has not asked yet."""

    async def body(world: World) -> None:
        await world.request(term=1)
        await world.tell(VersionUpdated(VersionRecord(1, 2, 0, 0, "live", "d1")))
        for assignment in await world.claim(2, version=1):
            await world.finish(assignment)
        assert not world.batches
        (fenced,) = world.system.log.named("request_fenced")
        assert (fenced["term"], fenced["newer"]) == (1, 2)
        await world.request(version=1, step=0, term=2)
        assert [ready.term for ready in world.batches] == [2]

    scenario(body)


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_fewer_prompts_than_a_batch_come_again_in_the_next_epoch(num_prompts: int) -> None:
    async def body(world: World) -> None:
        assignments = await world.claim(4)
        assert [a.epoch for a in assignments] == [i // num_prompts for i in range(4)]

    scenario(body, num_prompts=num_prompts)


def test_the_synchronous_baseline_waits_for_the_new_version() -> None:
    async def body(world: World) -> None:
        a, b = await world.claim(10)  # one batch of room, whatever the factor
        await world.finish(a)
        await world.finish(b)
        await world.request()
        await world.tell(StepTrained(1, 1, (0, 1), {}))
        assert len(world.assignments) == 2
        await world.tell(VersionUpdated(record(1)))
        assert len(world.assignments) == 2  # the worker may still generate with version 0
        assert world.system.facts("buffer")["withheld_groups"] == 2
        assert len(await world.claim(10, version=1)) == 2

    scenario(body, trainer={"num_steps": 3, "synchronous": True})


def test_conservation_holds_in_the_ledger() -> None:
    async def body(world: World) -> None:
        a, b, c, _ = await world.claim(4)
        await world.finish(a)
        await world.finish(b)
        await world.tell(failed(c))
        await world.request()
        await world.tell(StepTrained(1, 1, (0, 1), {}))
        counts = world.ledger.counts()
        assert sum(counts.values()) == 4 + len(world.assignments) - 4
        assert counts["trained"] == 2
        assert counts["dropped"] == 1

    scenario(body)


def test_the_reward_of_all_finished_groups_is_told_beside_that_of_the_batch() -> None:
    async def body(world: World) -> None:
        a, b, c, _ = await world.claim(4)
        await world.finish(a, rewards=(1.0, 1.0))  # filtered
        await world.finish(b, rewards=(0.0, 1.0))
        await world.finish(c, rewards=(0.0, 1.0))
        await world.request()
        stats = world.batches[0].stats
        assert stats.offered.groups == 3
        assert stats.offered.rewards.mean == pytest.approx(2 / 3)
        assert (stats.lost.groups, stats.lost.rewards.mean) == (1, 1.0)

    scenario(body, buffer={"filters": ["zero_spread"]})


# --- what it says of itself


def test_its_facts_are_where_the_groups_are_and_who_waits() -> None:
    async def body(world: World) -> None:
        assert world.system.facts("buffer") == {
            "queue_groups": 0,
            "in_flight_groups": 0,
            "withheld_groups": 0,
            "capacity": 4,
            "batch_groups": 2,
            "request_step": None,
            "credit_groups": 0,
            "dropped_groups": 0,
            "retried_groups": 0,
            "reissued_groups": 0,
        }
        a, b, c, d = await world.claim(10)
        await world.request()
        await world.finish(a)
        await world.tell(failed(b))
        facts = world.system.facts("buffer")
        assert (facts["queue_groups"], facts["in_flight_groups"]) == (1, 3)
        assert (facts["request_step"], facts["credit_groups"]) == (1, 5)
        assert facts["dropped_groups"] == 1
        await world.finish(c)  # the batch goes out, and the counters since the last one with it
        assert len(world.batches) == 1
        await world.tell(failed(d))
        facts = world.system.facts("buffer")
        assert (facts["request_step"], facts["dropped_groups"]) == (None, 2)

    scenario(body)


@pytest.mark.parametrize("groups", [1, 4])
def test_the_messages_of_a_turn_are_one_transaction(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        world = World(buffer={"batch_groups": groups, "capacity_factor": 1.0})
        await world.settle()
        given = await world.claim(groups)
        flush, told_before_each = GroupLedger.flush, []

        def counted(ledger: GroupLedger) -> None:
            told_before_each.append((len(world.batches), len(world.assignments)))
            flush(ledger)

        monkeypatch.setattr(GroupLedger, "flush", counted)
        claim = ClaimPrompts("rollout-0", "w1", 2 * groups, 0, "b1")
        request = RequestBatch("trainer-0", 1, 0, 0, None, "b1")
        await world.tell(*(finished(each, 0) for each in given), claim, request)
        assert told_before_each == [(0, groups)], "once, before anybody is told anything"
        assert (len(world.batches), len(world.assignments)) == (1, 2 * groups)

    run_virtual(main())


def test_a_buffer_that_fails_lets_go_of_its_ledger_and_undoes_its_last_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        world = World(directory=tmp_path)
        await asyncio.sleep(1)

        def fails(table: Any, *args: Any, **kwargs: Any) -> int:
            group_id = issue(table, *args, **kwargs)
            if group_id == 1:
                raise LookupError("a bug")
            return group_id

        issue = GroupLedger.issue
        monkeypatch.setattr(GroupLedger, "issue", fails)
        world.ref.tell(ClaimPrompts("rollout-0", "w1", 2, 0, "b1"))
        await asyncio.sleep(1)
        assert not world.ref.is_alive()
        ledger = GroupLedger.open(tmp_path / "ledger.sqlite")
        assert ledger.groups() == ()
        ledger.close()

    run_virtual(main())
