from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers.sglang_stub import SGLangStub
from tests.unit.backends.rollout.sglang.test_server import command

from ratchet.backends.rollout.sglang.fleet import Fleet, open_fleet
from ratchet.config import LoraConfig
from ratchet.config.sglang import SGLangConfig
from ratchet.errors import ConfigError, EngineLost

HEALTH_S = 0.4
API, ADMIN = "an-api-key-of-the-run", "an-admin-key-of-the-run"


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def opened(
    model: Path, *servers: SGLangStub, lora: LoraConfig | None = None, **fields: Any
) -> AsyncIterator[Fleet]:
    known = {"servers": tuple(server.url for server in servers), "health_s": HEALTH_S}
    config = SGLangConfig(**(known | {"start_timeout_s": 20.0} | fields))
    fleet = await open_fleet(config, model=model, dtype="float32", lora=lora, log=model / "log")
    try:
        yield fleet
    finally:
        await fleet.close()


def read(path: Path) -> str:
    return path.read_text()


def key_file(folder: Path, key: str) -> str:
    path = folder / key
    path.touch(mode=0o600)
    path.write_text(f"{key}\n")
    return str(path)


# --- what is found


def test_a_server_is_attached_to(model: Path) -> None:
    async def scenario() -> None:
        async with SGLangStub(context=512).serving() as stub, opened(model, stub) as fleet:
            (member,) = fleet.members
            assert (member.client.url, member.tp, member.context) == (stub.url, 1, 512)
            assert fleet.generation is member.client
            await member.client.pause("retract")
        assert stub.paused  # what is somebody else's is left as it is

    run(scenario())


def test_keys_are_tried_before_they_are_needed(model: Path, tmp_path: Path) -> None:
    files = {
        "api_key_file": key_file(tmp_path, API),
        "admin_key_file": key_file(tmp_path, ADMIN),
    }

    async def scenario() -> None:
        async with SGLangStub(api_key=API, admin_key=ADMIN).serving() as stub:
            async with opened(model, stub, **files):
                pass
            with pytest.raises(ConfigError, match=r"does not take the key of .*\.admin_key_file"):
                async with opened(model, stub, api_key_file=files["api_key_file"]):
                    pass
            with pytest.raises(ConfigError, match=r"does not take the key of .*\.api_key_file"):
                async with opened(model, stub):
                    pass

    run(scenario())


@pytest.mark.parametrize(
    ("stub", "problem"),
    [
        ({"sglang_version": "0.5.22.post1"}, "0.5.22.post1, and known holes are open .*CVE-2026-"),
        ({"sglang_version": "unknown"}, "use 0.5.23 or newer"),
        ({"dtype": "float16"}, "computes in 'float16'.* start it with --dtype float32"),
        ({"architecture": "LlamaForCausalLM"}, "of architecture .*Llama.*; start it with the run"),
        ({"facts": {"dp_size": 2}}, "has dp_size = 2"),
        ({"facts": {"disaggregation_mode": "prefill"}}, "half of a disaggregated pair"),
        ({"facts": {"enable_custom_logit_processor": True}}, "CVE-2026-7304"),
        ({"facts": {"tokenizer_worker_num": 4}}, "asks for no key"),
        ({"facts": {"tp_size": None}}, "says tp_size = None in /server_info"),
    ],
)
def test_a_server_that_is_not_what_the_run_needs_is_refused(
    model: Path, stub: dict[str, Any], problem: str
) -> None:
    async def scenario() -> None:
        async with SGLangStub(**stub).serving() as server:
            with pytest.raises(ConfigError, match=problem) as raised:
                async with opened(model, server):
                    pass
            assert server.url in str(raised.value)

    run(scenario())


def test_log_probabilities_without_the_temperature_are_refused(model: Path) -> None:
    async def scenario() -> None:
        async with SGLangStub(ignores_temperature=True).serving() as stub:
            with pytest.raises(ConfigError, match="without SGLANG_RETURN_ORIGINAL_LOGPROB") as why:
                async with opened(model, stub):
                    pass
            assert f"{stub.url} returns log probabilities without the temp" in str(why.value)
            stub.paused = True  # by an engine before, which has looked
            async with opened(model, stub):
                pass

    run(scenario())


def test_adapters_need_a_server_for_them(model: Path) -> None:
    async def scenario() -> None:
        async with SGLangStub().serving() as stub:
            with pytest.raises(ConfigError, match="start it with --enable-lora"):
                async with opened(model, stub, lora=LoraConfig()):
                    pass
            stub.facts["enable_lora"] = True
            async with opened(model, stub, lora=LoraConfig()):
                pass

    run(scenario())


def test_a_server_that_is_not_there_is_named(model: Path) -> None:
    async def scenario() -> None:
        stub = SGLangStub()
        async with stub.serving():
            pass
        with pytest.raises(EngineLost, match=r"not there within 0\.3 s .*start_timeout_s") as lost:
            async with opened(model, stub, start_timeout_s=0.3):
                pass
        assert stub.url in str(lost.value)

    run(scenario())


def test_a_launched_server_that_is_refused_is_stopped(model: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigError, match="is no SGLang server"):  # the fake tells nothing
            async with opened(model, command=command("serve")):
                pass
        said = json.loads(read(model / "log").splitlines()[0])
        assert not any(psutil.pid_exists(pid) for pid in said["pids"])

    run(scenario())


# --- what is watched


@asynccontextmanager
async def watched(
    model: Path, *stubs: SGLangStub, health_s: float = HEALTH_S
) -> AsyncIterator[asyncio.Task[EngineLost]]:
    """Watch servers that should serve version 7."""
    router = None if len(stubs) == 1 else stubs[0].url
    async with opened(model, *stubs, router=router, health_s=health_s) as fleet:
        for stub in stubs:
            stub.weight_version = "7"
        watch = asyncio.create_task(fleet.watch(lambda: "7" if not stubs[-1].paused else None))
        try:
            yield watch
        finally:
            watch.cancel()
            await asyncio.wait({watch})


async def looked_at(stub: SGLangStub, times: int = 1) -> None:
    seen = len(stub.called("/health"))
    while len(stub.called("/health")) < seen + times:  # noqa: ASYNC110 - the stub tells nobody
        await asyncio.sleep(0.01)


def test_a_server_that_is_gone_is_lost(model: Path) -> None:
    async def scenario() -> None:
        stay, go = SGLangStub(), SGLangStub()
        async with stay.serving():
            life = go.serving()
            await life.__aenter__()
            async with watched(model, stay, go, health_s=1.2) as watch:
                await looked_at(go)
                assert not watch.done()
                await life.__aexit__(None, None, None)
                assert str(await watch).startswith(f"the SGLang server at {go.url} is gone")

    run(scenario())


@pytest.mark.parametrize("path", ["/health", pytest.param("/model_info", marks=pytest.mark.soak)])
def test_a_server_that_does_not_answer_is_lost(model: Path, path: str) -> None:
    async def scenario() -> None:
        async with SGLangStub().serving() as stub, watched(model, stub) as watch:
            await looked_at(stub)
            stub.hung.add(path)
            assert "hangs: it was not healthy within 0.4 s" in str(await watch)
            stub.hung.clear()
            await stub.notify()

    run(scenario())


def test_a_server_that_stays_ill_is_lost(model: Path) -> None:
    async def scenario() -> None:
        async with SGLangStub().serving() as stub, watched(model, stub) as watch:
            stub.answers["/health"] = (503, {})
            assert "hangs" in str(await watch)

    run(scenario())


def test_a_server_that_is_paused_is_not_looked_at(model: Path) -> None:
    async def scenario() -> None:
        async with SGLangStub().serving() as stub, watched(model, stub) as watch:
            await looked_at(stub)
            stub.paused = True  # its /health is 503
            seen = len(stub.calls)
            await asyncio.sleep(1.5 * HEALTH_S)  # longer than an illness may take
            assert not watch.done()
            assert len(stub.calls) <= seen + 2
            stub.paused = False
            await looked_at(stub)
            assert not watch.done()

    run(scenario())


def test_a_server_that_was_started_again_is_lost(model: Path) -> None:
    async def scenario() -> None:
        async with SGLangStub().serving() as stub, watched(model, stub) as watch:
            await looked_at(stub)
            stub.weight_version = "default"
            assert "holds weights 'default', and it was given '7'" in str(await watch)

    run(scenario())


@pytest.mark.parametrize("answer", [{}, "a page of something else"])
def test_a_server_that_does_not_say_what_it_holds_is_lost(model: Path, answer: Any) -> None:
    async def scenario() -> None:
        async with SGLangStub().serving() as stub, watched(model, stub) as watch:
            await looked_at(stub)
            stub.answers["/model_info"] = (200, answer)
            told = f"at {stub.url} does not say in /model_info which weights it holds"
            assert told in str(await watch)

    run(scenario())
