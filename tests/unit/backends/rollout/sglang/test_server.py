from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers import fake_sglang

from ratchet.backends.rollout.sglang import server as server_module
from ratchet.backends.rollout.sglang.client import SGLangClient
from ratchet.backends.rollout.sglang.keys import Keys
from ratchet.backends.rollout.sglang.server import SGLangServer, server_arguments
from ratchet.config import LoraConfig
from ratchet.config.sglang import SGLangConfig
from ratchet.errors import ConfigError, EngineLost
from ratchet.runtime.role import STOP_S

KEYS = Keys("an-api-key-of-the-run", "an-admin-key-of-the-run")
GONE_S = 20.0


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


def command(behaviour: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", fake_sglang.__file__, behaviour)


def make_server(folder: Path, behaviour: str = "serve", **fields: Any) -> SGLangServer:
    config = SGLangConfig(**({"command": command(behaviour)} | fields))
    return SGLangServer(
        config, model=folder / "model", dtype="float32", lora=None, keys=KEYS, log=folder / "log"
    )


@asynccontextmanager
async def serving(server: SGLangServer) -> AsyncIterator[dict[str, Any]]:
    """Launch; give what the program has printed."""
    server.launch()
    client = SGLangClient(server.url)
    try:
        await server.ready(client, 30)
        yield json.loads(server.log.read_text().splitlines()[0])
    finally:
        await client.close()
        await server.stop()


async def refused(server: SGLangServer, error: type[Exception], timeout_s: float = 30.0) -> str:
    server.launch()
    client = SGLangClient(server.url)
    try:
        with pytest.raises(error) as raised:
            await server.ready(client, timeout_s)
        return str(raised.value)
    finally:
        await client.close()
        await server.stop()


def exists(path: str) -> bool:
    return Path(path).exists()


def check_private(file: Path) -> None:
    assert json.loads(file.read_text()) == {"api-key": KEYS.api, "admin-api-key": KEYS.admin}
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def until_gone(pids: list[int]) -> None:
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    deadline = time.monotonic() + GONE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_server_is_told() -> None:
    config = SGLangConfig(tp=2, args=("--device", "cpu"))
    lora = LoraConfig(rank=8, target_modules=("q_proj", "v_proj"))
    given = server_arguments(
        config, model=Path("m"), dtype="bfloat16", lora=lora, port=1, group_port=2
    )
    assert " ".join(given) == (
        "--model-path m --dtype bfloat16 --tp-size 2 --host 127.0.0.1 --port 1 --nccl-port 2"
        " --log-level-http warning --enable-lora --max-lora-rank 8 --lora-target-modules q_proj"
        " v_proj --device cpu"
    )


def test_keys_are_in_no_command_line_environment_or_log(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = make_server(tmp_path)
        async with serving(server) as said:
            assert said["config"] == {"api-key": "***", "admin-api-key": "***"}
            check_private(Path(said["options"]["--config"]))
            process = psutil.Process(said["pids"][0])
            keeper = process.parent()
            assert keeper is not None
            for each in (process, keeper):
                seen = str(each.cmdline()) + str(each.environ())
                assert KEYS.api not in seen
                assert KEYS.admin not in seen

    run(scenario())


def test_variables_that_change_what_results_mean_are_not_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = ["SGLANG_RETURN_ORIGINAL_LOGPROB", "SGLANG_SIMULATE_ACC_LEN"]
    for name in (*refused, "SGLANG_ENABLE_TORCH_COMPILE"):
        monkeypatch.setenv(name, "1")

    async def scenario() -> None:
        server = make_server(tmp_path)
        server.launch()
        try:
            await server.ready(client := SGLangClient(server.url), 30)
            await client.close()
        finally:
            await server.stop()
        *words, said = server.log.read_text().splitlines()
        assert json.loads(said)["variables"] == ["SGLANG_ENABLE_TORCH_COMPILE"]
        assert [line.split()[1] for line in words] == refused

    run(scenario())


def test_nothing_is_left_after_a_stop(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = make_server(tmp_path)
        async with serving(server) as said:
            assert all(psutil.pid_exists(pid) for pid in said["pids"])
            ended = asyncio.create_task(server.ended())
        assert not any(psutil.pid_exists(pid) for pid in said["pids"])
        assert not exists(said["folder"])
        assert "died of signal 9" in await ended
        await server.stop()  # idempotent

    run(scenario())


def test_its_end_is_told_with_what_it_said_last(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = make_server(tmp_path)
        async with serving(server) as said:
            os.kill(said["pids"][0], signal.SIGTERM)
            told = await server.ended()
            assert told.startswith("the SGLang server died of signal 15; the end of")
            assert not psutil.pid_exists(said["pids"][1])  # what it had started
            assert KEYS.api not in told

    run(scenario())


@pytest.mark.soak
def test_a_killed_keeper_takes_its_server_along(tmp_path: Path) -> None:
    async def scenario() -> None:
        server = make_server(tmp_path)
        async with serving(server) as said:
            keeper = psutil.Process(said["pids"][0]).parent()
            assert keeper is not None
            keeper.kill()
            assert "was lost with its keeper" in await server.ended()
            await asyncio.to_thread(until_gone, said["pids"][:1])
            os.kill(said["pids"][1], signal.SIGKILL)  # its own session, and nobody's child now
            shutil.rmtree(said["folder"])  # nobody is left to remove it

    run(scenario())


def test_a_keeper_that_does_not_stop_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_STOP_S", 0.2)
    monkeypatch.setattr(server_module, "_KILL_S", GONE_S)

    async def scenario() -> None:
        server = make_server(tmp_path)
        async with serving(server) as said:
            keeper = psutil.Process(said["pids"][0]).parent()
            assert keeper is not None
            keeper.suspend()
            try:
                async with asyncio.timeout(GONE_S):
                    await server.stop()
            finally:
                with contextlib.suppress(psutil.NoSuchProcess):
                    keeper.resume()
            assert "was lost with its keeper" in await server.ended()
            await asyncio.to_thread(until_gone, said["pids"][:1])
            os.kill(said["pids"][1], signal.SIGKILL)  # its own session, and nobody's child now
            shutil.rmtree(said["folder"])

    run(scenario())


def test_a_stop_takes_no_longer_than_a_role_has() -> None:
    assert server_module._STOP_S + server_module._KILL_S < STOP_S


_PARENT = """
import asyncio, sys
from pathlib import Path
from ratchet.backends.rollout.sglang.keys import Keys
from ratchet.backends.rollout.sglang.server import SGLangServer
from ratchet.config.sglang import SGLangConfig

async def main():
    folder, *command = sys.argv[1:]
    where = {"model": Path(folder), "log": Path(folder, "log")}
    config = SGLangConfig(command=tuple(command))
    SGLangServer(config, dtype="float32", lora=None, keys=Keys(None, None), **where).launch()
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_nothing_is_left_after_a_kill_of_the_worker(tmp_path: Path) -> None:
    log = tmp_path / "log"
    argv = [sys.executable, "-c", _PARENT, str(tmp_path), *command("serve")]
    with subprocess.Popen(argv) as worker:
        try:
            until(lambda: log.exists() and b"\n" in log.read_bytes())
            said = json.loads(log.read_text().splitlines()[0])
            keeper = psutil.Process(said["pids"][0]).ppid()
        finally:
            worker.kill()
    until_gone([*said["pids"], keeper])
    assert not exists(said["folder"])


def test_a_server_that_does_not_understand_its_arguments_is_the_users(tmp_path: Path) -> None:
    async def scenario() -> None:
        told = await refused(make_server(tmp_path, "usage"), ConfigError)
        assert "ended with exit code 2; see rollout.sglang.command and rollout.sglang.args" in told
        assert told.endswith("unrecognized arguments: --no-such")
        server = make_server(tmp_path / "no", command=("/no/such/program",))
        told = await refused(server, ConfigError)
        assert "No such file or directory: '/no/such/program'" in told

    run(scenario())


def test_a_server_that_fails_to_start_says_why(tmp_path: Path) -> None:
    async def scenario() -> None:
        told = await refused(make_server(tmp_path, "crash"), EngineLost)
        assert "died of signal 11 while it started" in told
        assert told.endswith("out of memory")
        told = await refused(make_server(tmp_path / "mute", "mute"), EngineLost, 0.5)
        assert "did not respond within 0.5 s (rollout.sglang.start_timeout_s)" in told

    run(scenario())


def test_its_port_is_nobody_elses(tmp_path: Path) -> None:
    server = make_server(tmp_path)
    with socket.socket() as other:
        with pytest.raises(OSError, match="in use") as raised:
            other.bind(("127.0.0.1", int(server.url.rpartition(":")[2])))
        assert raised.value.errno == errno.EADDRINUSE
    asyncio.run(server.stop())
