"""A load in front of two servers: what they are told, when, and what is left where it fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch
from tests.helpers.sglang_stub import SGLangStub

from ratchet.backends.rollout.sglang import weights
from ratchet.backends.rollout.sglang.client import SGLangClient
from ratchet.backends.rollout.sglang.weights import RelayedWeights
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import ProbedSink, TensorSpec
from ratchet.types import Packed, PauseMode, WeightProbe

SPECS = (
    TensorSpec("half", "bfloat16", (3,)),
    TensorSpec("full", "float32", (2, 2)),
    TensorSpec("tied", "float32", (2, 2), "full"),
)
TENSORS = {"half": torch.ones(3, dtype=torch.bfloat16), "full": torch.ones(2, 2)}
RIGHT = WeightProbe(3, Packed.of([1, 2, 3], "int32"), Packed.of([-1.0, -1.0], "float32"))
WRONG = WeightProbe(3, Packed.of([1, 2, 3], "int32"), Packed.of([-1.0, -1.2], "float32"))


class Group:
    """Stands in for the process group: the stub knows its name only."""

    made: list[Group] = []

    def __init__(self, servers: Sequence[SGLangClient], sizes: Sequence[int], host: str) -> None:
        self.name = f"group-{len(self.made)}"
        self.servers = servers
        self.sent: list[list[torch.Tensor]] = []
        self.lost: str | None = None
        self.closed = False
        self.made.append(self)

    async def form(self, timeout_s: float) -> None:
        for server in self.servers:
            await server.init_group(
                address="", port=0, rank_offset=1, world_size=2, name=self.name, backend="gloo"
            )

    def send(self, tensors: Sequence[torch.Tensor], timeout_s: float) -> asyncio.Future[None]:
        self.sent.append(list(tensors))
        future = asyncio.get_running_loop().create_future()
        if self.lost is None:
            future.set_result(None)
        else:
            future.set_exception(TransferFailed(self.lost))
        return future

    async def close(self) -> None:
        self.closed = True


class World:
    def __init__(self, sink: RelayedWeights, stubs: list[SGLangStub]) -> None:
        self.sink = sink
        self.stubs = stubs

    async def load(
        self, version: int, probe: WeightProbe | None = RIGHT, mode: PauseMode = "retract"
    ) -> None:
        """As `finalize` does."""
        self.sink.expect(probe)
        try:
            await self.sink.pause(mode)
            await self.sink.write(TENSORS)
            await self.sink.stamp(version)
        finally:
            await self.sink.resume()

    def paths(self) -> list[str]:
        """Return what the first server was asked since the last time."""
        paths = [path for path, _ in self.stubs[0].calls]
        self.stubs[0].calls.clear()
        return paths


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Group]:
    monkeypatch.setattr(Group, "made", [])
    monkeypatch.setattr(weights, "ServerGroup", Group)
    return Group.made


def run(body: Callable[[World], Awaitable[None]]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack, asyncio.timeout(20):
            stubs = [await stack.enter_async_context(SGLangStub().serving()) for _ in range(2)]
            clients = [SGLangClient(stub.url) for stub in stubs]
            for client in clients:
                stack.push_async_callback(client.close)
            sink = RelayedWeights(
                clients, [1, 1], SPECS, host="127.0.0.1", tolerance=0.1, timeout_s=5.0
            )
            assert isinstance(sink, ProbedSink)
            assert sink.specs() == SPECS
            await body(World(sink, stubs))

    asyncio.run(main())


UPDATE = ["/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update"]


def test_a_load_is_paused_written_named_proved_and_goes_on(groups: list[Group]) -> None:
    async def body(world: World) -> None:
        await world.load(7)
        assert world.paths() == [
            "/pause_generation", UPDATE[0], "/init_weights_update_group", *UPDATE[1:],
            "/flush_cache", "/update_weight_version", "/continue_generation", "/generate",
            "/continue_generation",
        ]  # fmt: skip
        assert world.sink.version == 7
        assert await world.sink.decided(7)
        assert [stub.weight_version for stub in world.stubs] == ["7", "7"]
        (sent,) = groups[0].sent
        assert [tensor.dtype for tensor in sent] == [torch.float32, torch.bfloat16]  # aligned
        assert len(groups) == 1

    run(body)


@pytest.mark.parametrize("overlap", [False, True])
def test_in_place_is_for_servers_that_give_no_token_of_before_the_name_of_after(
    groups: list[Group], *, overlap: bool
) -> None:
    async def body(world: World) -> None:
        world.stubs[0].facts = {"disable_overlap_schedule": True}
        world.stubs[1].facts = {"disable_overlap_schedule": not overlap}
        for version in (7, 8):
            await world.load(version, mode="in_place")
            assert world.sink.version == version
        mode = "retract" if overlap else "in_place"
        assert world.stubs[0].called("/pause_generation") == [{"mode": mode}] * 2
        assert bool(world.stubs[0].called("/flush_cache")) is overlap  # refused while requests run
        assert len(world.stubs[1].called("/server_info")) == 1

    run(body)


def test_without_a_probe_the_weights_are_taken_on_trust(groups: list[Group]) -> None:
    async def body(world: World) -> None:
        await world.load(7, probe=None)
        assert world.sink.version == 7
        assert "/generate" not in world.paths()

    run(body)


def test_what_a_server_computes_otherwise_is_refused_and_stays_paused(
    groups: list[Group],
) -> None:
    async def body(world: World) -> None:
        await world.load(7)
        world.stubs[1].prompt_logprob = -1.25
        with pytest.raises(WeightsMismatch, match=r"version 8.*0\.25 .*token 1 of sequence 0") as e:
            await world.load(8)
        assert world.stubs[1].url in str(e.value)
        assert world.sink.version is None
        assert [stub.paused for stub in world.stubs] == [True, True]
        assert await world.sink.decided(7)
        assert not await world.sink.decided(8)
        world.stubs[1].prompt_logprob = -1.0
        await world.load(9)
        assert world.sink.version == 9
        assert [stub.paused for stub in world.stubs] == [False, False]

    run(body)


def test_a_completion_of_a_version_in_proof_waits_for_the_verdict(groups: list[Group]) -> None:
    async def body(world: World) -> None:
        for version, probe in ((7, RIGHT), (8, WRONG)):
            world.stubs[0].hung.add("/generate")
            loading = asyncio.create_task(world.load(version, probe))
            await world.stubs[0].until_called("/generate")
            assert world.sink.version is None
            assert not world.stubs[0].paused  # or it could not score
            deciding = asyncio.create_task(world.sink.decided(version))
            await asyncio.sleep(0)
            assert not deciding.done()
            world.stubs[0].hung.clear()
            await world.stubs[0].notify()
            await asyncio.wait([loading])
            assert await deciding is (version == 7)
            assert (loading.exception() is None) is (version == 7)
            world.paths()

    run(body)


@pytest.mark.parametrize("path", [*UPDATE, "/flush_cache", "/update_weight_version"])
def test_a_refusal_after_the_pause_leaves_the_engine_without_a_version_and_paused(
    groups: list[Group], path: str
) -> None:
    async def body(world: World) -> None:
        await world.load(7)
        world.stubs[1].answers[path] = (400, {"success": False, "message": "refused here"})
        with pytest.raises(TransferFailed, match="refused here"):
            await world.load(8)
        assert world.stubs[0].paused
        assert world.sink.version is None or path == UPDATE[0]
        world.stubs[1].answers.clear()
        await world.load(9)
        assert world.sink.version == 9
        assert not world.stubs[0].paused

    run(body)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("bogus", torch.ones(3), "bogus"),
        ("tied", torch.ones(2, 2), "tied"),
        ("full", torch.ones(4), "full is float32"),
        ("half", torch.ones(3), "half is bfloat16"),
    ],
)
def test_nothing_is_sent_that_is_not_the_models(
    groups: list[Group], name: str, tensor: torch.Tensor, words: str
) -> None:
    async def body(world: World) -> None:
        with pytest.raises(WeightsMismatch, match=words):
            await world.sink.write({**TENSORS, name: tensor})
        assert world.paths() == []
        with pytest.raises(WeightsMismatch, match="gives no weights back"):
            await world.sink.read(["full"])

    run(body)


def test_a_server_that_was_started_again_is_met_in_a_new_group(groups: list[Group]) -> None:
    async def body(world: World) -> None:
        await world.load(7)
        world.stubs[1].groups.clear()
        await world.load(8)
        assert world.sink.version == 8
        assert [group.closed for group in groups] == [True, False]

    run(body)


def test_a_group_that_breaks_is_given_up_and_the_next_load_makes_another(
    groups: list[Group],
) -> None:
    async def body(world: World) -> None:
        await world.load(7)
        await world.sink.pause("retract")
        await world.sink.write({"half": TENSORS["half"]})
        groups[0].lost = "connection closed by peer"
        with pytest.raises(TransferFailed, match="closed by peer"):
            await world.sink.write({"full": TENSORS["full"]})
        await world.sink.resume()
        assert groups[0].closed
        assert world.stubs[0].paused
        await world.load(9)
        assert [len(group.sent) for group in groups] == [3, 1]

    run(body)


def test_a_load_that_ended_between_two_buckets_leaves_no_session_to_the_next(
    groups: list[Group],
) -> None:
    async def body(world: World) -> None:
        await world.load(7)
        await world.sink.pause("retract")
        await world.sink.write({"half": TENSORS["half"]})
        await world.sink.resume()  # the transfer was cut
        for stub in world.stubs:  # and the servers were started again
            stub.updating, stub.paused = False, False
            stub.groups.clear()
        await world.load(8)
        assert world.sink.version == 8

    run(body)


def test_who_is_cancelled_in_the_proof_has_refused_it(groups: list[Group]) -> None:
    async def body(world: World) -> None:
        world.stubs[0].hung.add("/generate")
        loading = asyncio.create_task(world.load(7))
        await world.stubs[0].until_called("/generate")
        loading.cancel()
        results: list[Any] = await asyncio.gather(loading, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert [stub.paused for stub in world.stubs] == [True, True]
        assert not await world.sink.decided(7)

    run(body)
