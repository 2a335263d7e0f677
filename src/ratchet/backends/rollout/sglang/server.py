"""One launched SGLang server: its command line, its ports, its process.

Consumes `[rollout.sglang]`, a model directory and keys; produces a server that listens on loopback,
and its end. Waits for the server to respond, and for the end of one that was told to stop, each up
to a deadline, and for its own end; that is told by the kernel, through the pipe that its keeper
(`sglang.keeper`) holds.

Ports are bound here before the server is started, and stay bound as long as it lives: the kernel
gives a bound port to nobody who asks for any, while SGLang, which sets SO_REUSEADDR as everybody
does for a port that it was told, can listen on it beside a socket that does not listen.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from asyncio import FIRST_COMPLETED
from pathlib import Path
from typing import Any, Final

from ratchet.backends.rollout.sglang.client import CallFailed, SGLangClient
from ratchet.backends.rollout.sglang.keeper import Task
from ratchet.backends.rollout.sglang.keys import Keys
from ratchet.config import LoraConfig
from ratchet.config.sglang import SGLangConfig
from ratchet.errors import ConfigError, EngineLost, RatchetError

HOST: Final = "127.0.0.1"
_KEEPER: Final = (sys.executable, "-m", "ratchet.backends.rollout.sglang.keeper")
_COMMAND: Final = (sys.executable, "-m", "sglang.launch_server")
_USAGE: Final = 2
"""Exit code of a program that does not understand its arguments."""
_LOOK_S: Final = 0.5
_LOOK_TIMEOUT_S: Final = 30.0
"""Of one look at a server that starts: /health makes a token, the first one slowly."""
_STOP_S: Final = 5.0
_KILL_S: Final = 0.5
"""Seconds of a keeper to end its server, and to die itself: less than `runtime.role.STOP_S`, after
which the process of the worker leaves.
"""
_TAIL_BYTES: Final = 16384
_TAIL_LINES: Final = 20
_TAIL_WIDTH: Final = 300
"""Characters: SGLang prints all its arguments on one line."""


def server_arguments(
    config: SGLangConfig,
    *,
    model: Path,
    dtype: str,
    lora: LoraConfig | None,
    port: int,
    group_port: int,
) -> list[str]:
    """Return what the command is given: the user's own arguments last.

    Args:
        config: of the servers.
        model: its directory.
        dtype: of its weights; SGLang's own choice would serve float32 as float16.
        lora: of the adapters that it will be given.
        port: for HTTP.
        group_port: where its ranks meet.
    """
    return [
        *("--model-path", str(model)),
        *("--dtype", dtype),
        *("--tp-size", str(config.tp)),
        *("--host", HOST),
        *("--port", str(port)),
        *("--nccl-port", str(group_port)),
        *("--log-level-http", "warning"),  # else a line for each request
        *_lora_arguments(lora),
        *config.args,
    ]


def _lora_arguments(lora: LoraConfig | None) -> list[str]:
    """Say beforehand what adapters will look like: the server sets memory aside for them."""
    if lora is None:
        return []
    targets = ["all"] if lora.target_modules == "all-linear" else lora.target_modules
    return ["--enable-lora", "--max-lora-rank", str(lora.rank), "--lora-target-modules", *targets]


class SGLangServer:
    """A server of our own. It ends with this process, whatever ends that.

    Args:
        config: of the servers.
        model: directory of the model that it starts with.
        dtype: of its weights.
        lora: of the adapters that it will be given.
        keys: that it asks for; they reach it through a private file.
        log: file that its output is added to.
    """

    def __init__(
        self,
        config: SGLangConfig,
        *,
        model: Path,
        dtype: str,
        lora: LoraConfig | None,
        keys: Keys,
        log: Path,
    ) -> None:
        self.log = log
        self._ports = [_bound_port(), _bound_port()]
        port, group_port = (each.getsockname()[1] for each in self._ports)
        self.url = f"http://{HOST}:{port}"
        arguments = server_arguments(
            config, model=model, dtype=dtype, lora=lora, port=port, group_port=group_port
        )
        secrets = {"api-key": keys.api, "admin-api-key": keys.admin}
        self._task = Task(
            argv=[*(config.command or _COMMAND), *arguments],
            config={name: key for name, key in secrets.items() if key is not None},
            log=str(log),
        )
        self._life: _Life | None = None

    def launch(self) -> None:
        """Start the process; `ready` waits for it.

        Raises:
            OSError: there is no process to be had.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._life = _Life(json.dumps(self._task).encode() + b"\n")

    async def ready(self, client: SGLangClient, timeout_s: float) -> None:
        """Wait until it serves; it is stopped if it does not.

        Raises:
            ConfigError: if it does not understand its arguments, or there is no such command.
            EngineLost: if it ends or takes longer than `timeout_s`; the text has the end of its
                log.
        """
        looking = asyncio.create_task(_until_healthy(client))
        try:
            either: set[asyncio.Future[Any]] = {looking, self._begun.gone}
            done, _ = await asyncio.wait(either, timeout=timeout_s, return_when=FIRST_COMPLETED)
            if self._begun.gone in done:
                raise self._failed_start(self._begun.gone.result())
            if not done:
                msg = (
                    f"the SGLang server did not respond within {timeout_s:g} s"
                    f" (rollout.sglang.start_timeout_s){self._last_lines()}"
                )
                raise EngineLost(msg)
            looking.result()
        except BaseException:
            await self.stop()
            raise
        finally:
            looking.cancel()
            await asyncio.wait({looking})

    async def ended(self) -> str:
        """Wait until the server and all that it has started are gone; say how it went."""
        words = await asyncio.shield(self._begun.gone)
        return f"the SGLang server {_how_it_went(words)}{self._last_lines()}"

    async def stop(self) -> None:
        """Kill the server and all that it has started, and wait for their end. Idempotent.

        A keeper that does not manage within `_STOP_S` is killed, and the kernel kills its server
        with it; one that hangs in the kernel is left to init.
        """
        if self._life is not None:
            await self._life.stop()
        for port in self._ports:
            port.close()

    @property
    def _begun(self) -> _Life:
        if self._life is None:
            raise RuntimeError("the server was not launched")
        return self._life

    def _failed_start(self, words: bytes) -> RatchetError:
        how, said = _how_it_went(words), json.loads(words or b"{}")
        if "error" in said or said.get("code") == _USAGE:
            return ConfigError(
                f"rollout.sglang: {self._task['argv'][0]} {how}; see rollout.sglang.command and"
                f" rollout.sglang.args{self._last_lines()}"
            )
        return EngineLost(f"the SGLang server {how} while it started{self._last_lines()}")

    def _last_lines(self) -> str:
        """Return the end of the log, which has no keys in it."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
            if lines:
                tail = "\n  ".join(line[:_TAIL_WIDTH] for line in lines)
                return f"; the end of {self.log}:\n  {tail}"
        return f"; {self.log} is empty"


class _Life:
    """A keeper and its server, from the start until both are gone. Needs a running loop.

    Args:
        task: one line for the keeper.
    """

    def __init__(self, task: bytes) -> None:
        self._loop = asyncio.get_running_loop()
        self._keeper = subprocess.Popen(  # noqa: S603 - our own module
            _KEEPER,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # whoever kills our group leaves it to clear up
        )
        assert self._keeper.stdin is not None  # noqa: S101 - both are pipes
        assert self._keeper.stdout is not None  # noqa: S101
        self._input, self._output = self._keeper.stdin, self._keeper.stdout
        self._words = bytearray()
        self.gone: asyncio.Future[bytes] = self._loop.create_future()
        """the keeper's last words"""
        self._loop.add_reader(self._output.fileno(), self._read)
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is told
            self._input.write(task)

    async def stop(self) -> None:
        self._input.close()
        await asyncio.wait({self.gone}, timeout=_STOP_S)
        if not self.gone.done():  # so it is not reaped, and nobody else has its number
            os.killpg(self._keeper.pid, signal.SIGKILL)
            await asyncio.wait({self.gone}, timeout=_KILL_S)

    def _read(self) -> None:
        data = self._output.read(4096)
        self._words += data or b""
        if data == b"":  # the keeper alone holds the other end
            self._loop.remove_reader(self._output.fileno())
            self._input.close()
            self._output.close()
            self._keeper.wait()
            self.gone.set_result(bytes(self._words))


def _how_it_went(words: bytes) -> str:
    said = json.loads(words or b"{}")
    if "error" in said:
        return f"could not be started: {said['error']}"
    code = said.get("code")
    if code is None:
        return "was lost with its keeper"
    return f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"


async def _until_healthy(client: SGLangClient) -> None:
    while True:
        try:
            if await client.healthy(timeout_s=_LOOK_TIMEOUT_S):
                return
        except CallFailed:  # it does not listen yet, or is busy with its first token
            pass
        await asyncio.sleep(_LOOK_S)


def _bound_port() -> socket.socket:
    """Return a socket that keeps a port without listening on it."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((HOST, 0))
    return bound
