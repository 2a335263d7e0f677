"""The buffer between trainers of several terms: the older ones are fenced, whatever they asked."""

from __future__ import annotations

from tests.helpers.buffer_world import World, ids, scenario
from tests.simulation.loop import run_virtual

from ratchet.messages import BatchReady, RequestBatch, StepTrained, VersionUpdated
from ratchet.types import VersionRecord


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
