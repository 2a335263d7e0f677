"""Weights from a trainer straight into real servers of one rank and of two, proved by the probe."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.helpers.sglang_server import RealServer
from tests.helpers.tiny_models import CHARS, TINY

from ratchet.backends.models import build_model, char_tokenizer
from ratchet.backends.named_weights import named_weights, weight_specs
from ratchet.backends.rollout.sglang.client import SGLangClient
from ratchet.backends.rollout.sglang.direct import DirectWeights
from ratchet.backends.training.probe import compute_probe
from ratchet.config import WeightsConfig
from ratchet.errors import TransferFailed, WeightsMismatch
from ratchet.transport.weights.base import LoadReport, SendReport, TensorSpec, WeightReceiver
from ratchet.transport.weights.registry import open_receiver, open_sender
from ratchet.types import PauseMode, PolicyVersion

CONFIG = WeightsConfig(transport="direct", backend="gloo", bucket_mib=0.03, timeout_s=120.0)
HOST = "127.0.0.1"


class Model:
    """A trainer's parameters: those of version n are drawn from seed n."""

    def __init__(self) -> None:
        self.load(0)

    def load(self, seed: int) -> None:
        self.model = build_model(TINY["qwen3"], seed, char_tokenizer(CHARS)).eval()

    def specs(self) -> Sequence[TensorSpec]:
        return weight_specs(named_weights(self.model))

    def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        return [self.model.get_parameter(name).detach() for name in names]


class Run:
    """A trainer, and engines of real servers."""

    def __init__(self) -> None:
        self.model = Model()
        self.sender = open_sender(CONFIG, HOST, self.model)
        self.engines: dict[str, DirectWeights] = {}
        self.receivers: dict[str, WeightReceiver] = {}
        self.version = 0

    def add(self, sizes: Mapping[str, int]) -> str:
        name = f"rollout-{len(self.engines)}/a"
        clients = [SGLangClient(url) for url in sizes]
        self.engines[name] = DirectWeights(
            clients,
            list(sizes.values()),
            self.model.specs(),
            hold=lambda: None,
            lost=pytest.fail,
            tolerance=1e-3,
            timeout_s=60.0,
        )
        self.receivers[name] = open_receiver(CONFIG)
        return name

    async def __aenter__(self) -> Run:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for receiver in self.receivers.values():
            await receiver.close()
        await self.sender.close()
        for engine in self.engines.values():
            await asyncio.gather(*(client.close() for client in engine.session.servers))

    async def sync(
        self,
        *names: str,
        catch_up: bool = False,
        mode: PauseMode = "retract",
        other_probe: bool = False,
    ) -> tuple[Any, list[Any]]:
        """Publish the next version, or what there is; with a probe of other weights if wanted."""
        if not catch_up:
            self.version += 1
        version, names = self.version, names or tuple(self.engines)
        self.model.load(version + 1 if other_probe else version)
        probe = compute_probe(self.model.model, torch.device("cpu"), version)
        self.model.load(version)
        manifest, routes = self.sender.plan(1, version, version, names, catch_up=catch_up)
        offered = msgspec.structs.replace(manifest, probe=probe)
        sent, *loaded = await asyncio.gather(
            self.sender.send(manifest),
            *(self.receivers[n].receive(offered, routes[n], self.engines[n], mode) for n in names),
            return_exceptions=True,
        )
        return sent, loaded

    async def sync_well(self, *names: str, **how: Any) -> None:
        sent, loaded = await self.sync(*names, **how)
        assert isinstance(sent, SendReport), sent
        for name, report in zip(names or self.engines, loaded, strict=True):
            assert isinstance(report, LoadReport), report
            assert report.digest == sent.digest
            await self.serves(name, self.version)

    async def serves(self, name: str, version: PolicyVersion) -> None:
        assert self.engines[name].version == version
        for server in self.engines[name].session.servers:
            answer = await generate(server, 1)
            assert answer["meta_info"]["weight_version"] == str(version)


async def generate(server: SGLangClient, num_tokens: int) -> Any:
    sampling = {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [1, 2, 3], "sampling_params": sampling}
    return await server.generate(body, timeout_s=60.0)


def run(scenario: Callable[[Run], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(240), Run() as trainer:
            await scenario(trainer)

    work: Coroutine[Any, Any, None] = bounded()
    asyncio.run(work)


@pytest.fixture(scope="module")
def two_ranks(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # a core for each rank
        server = RealServer(real_model, tmp_path_factory.mktemp("direct") / "sglang.log", tp=2)
    yield server
    server.close()


def test_every_version_reaches_servers_of_one_rank_and_of_two(
    real_server: RealServer, two_ranks: RealServer
) -> None:
    async def scenario(trainer: Run) -> None:
        first = trainer.add({real_server.url: 1})
        await trainer.sync_well()
        late = trainer.add({two_ranks.url: 2})
        await trainer.sync_well(late, catch_up=True)
        await trainer.sync_well()
        await trainer.serves(first, 2)
        long = asyncio.create_task(generate(trainer.engines[late].session.servers[0], 300))
        await asyncio.sleep(0)
        await trainer.sync_well(mode="in_place")
        answer = await long
        assert answer["meta_info"]["finish_reason"]["type"] == "length"
        assert len(answer["output_ids"]) == 300

    run(scenario)


def test_an_engine_may_have_several_servers(real_server: RealServer, two_ranks: RealServer) -> None:
    async def scenario(trainer: Run) -> None:
        trainer.add({real_server.url: 1, two_ranks.url: 2})
        await trainer.sync_well()
        await trainer.sync_well()

    run(scenario)


def test_weights_that_are_not_the_trainers_are_refused(real_server: RealServer) -> None:
    async def scenario(trainer: Run) -> None:
        name = trainer.add({real_server.url: 1})
        await trainer.sync_well()
        _, (refused,) = await trainer.sync(other_probe=True)
        assert isinstance(refused, WeightsMismatch)
        assert "does not compute what the trainer does" in str(refused)
        assert trainer.engines[name].version is None
        (server,) = trainer.engines[name].session.servers
        assert not await server.healthy(), "it is kept paused"
        await trainer.sync_well(catch_up=True)

    run(scenario)


def test_a_server_killed_in_the_middle_costs_its_engine_alone(
    real_server: RealServer, two_ranks: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(trainer: Run) -> None:
        good, bad = trainer.add({real_server.url: 1}), trainer.add({two_ranks.url: 2})
        await trainer.sync_well()
        load, doomed = DirectWeights.load, two_ranks.processes()

        async def killing(self: DirectWeights, *args: Any) -> None:
            if self is trainer.engines[bad]:
                for process in doomed:
                    process.kill()
            await load(self, *args)

        monkeypatch.setattr(DirectWeights, "load", killing)
        sent, (loaded, lost) = await trainer.sync()
        assert isinstance(sent, SendReport), sent
        assert list(sent.lost) == [bad]
        assert isinstance(loaded, LoadReport), loaded
        assert isinstance(lost, TransferFailed), lost
        await trainer.serves(good, 2)
        assert trainer.engines[bad].version is None
        monkeypatch.undo()
        await trainer.sync_well(good)

    run(scenario)
