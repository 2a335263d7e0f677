"""A real SGLang server on this CPU, in the environment that `make sglang-cpu` makes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import psutil
from tests.helpers.config import small_config

from ratchet.backends.rollout.sglang.client import SGLangClient
from ratchet.backends.rollout.sglang.keys import Keys
from ratchet.backends.rollout.sglang.server import SGLangServer
from ratchet.config import Config, LoraConfig
from ratchet.config.sglang import SGLangConfig

T = TypeVar("T")

ROOT: Final = Path(__file__).parents[2]
PYTHON: Final = ROOT / ".venv-sglang" / "bin" / "python"
COMMAND: Final = (str(PYTHON), str(ROOT / "deploy" / "sglang-cpu" / "serve.py"))
ARGS: Final = ("--max-total-tokens", "16384", "--skip-server-warmup")
START_S: Final = 600.0
"""On a loaded machine; 25 s on a quiet one."""
NO_KEYS: Final = Keys(None, None)


def sglang_config(**fields: Any) -> SGLangConfig:
    """Return a section that launches such a server."""
    known = {"command": COMMAND, "args": ARGS, "start_timeout_s": START_S}
    return SGLangConfig(**(known | fields))


def attached_config(server: RealServer, model: Path, **fields: Any) -> Config:
    """Return the configuration of a run whose engine attaches to a server.

    Args:
        server: that runs.
        model: directory of the run's model, of the server's shape.
        fields: of the section.
    """
    return small_config(
        model={"path": str(model), "build": None, "tokenizer_chars": None},
        rollout={
            "backend": "sglang",
            "max_tokens": 5,
            "group_size": 4,
            "sglang": {"servers": [server.url], **fields},
        },
    )


class RealServer:
    """A server that lives as long as this object, whichever loops come and go: it is waited for on
    a loop of its own.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        keys: Keys = NO_KEYS,
        lora: LoraConfig | None = None,
        **fields: Any,
    ) -> None:
        self.model, self.log, self.keys = model, log, keys
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sglang-server")
        self._thread.start()
        try:
            self._server = self._do(self._start(sglang_config(**fields), lora))
        except BaseException:
            self._end_thread()
            raise
        self.url = self._server.url

    async def _start(self, config: SGLangConfig, lora: LoraConfig | None) -> SGLangServer:
        server = SGLangServer(
            config, model=self.model, dtype="float32", lora=lora, keys=self.keys, log=self.log
        )
        server.launch()
        client = SGLangClient(server.url, api_key=self.keys.api, admin_key=self.keys.admin)
        try:
            await server.ready(client, config.start_timeout_s)
        finally:
            await client.close()
        return server

    def reset(self) -> None:
        """Bring the base weights back, under the name "default", and let the server generate."""
        self._do(self._reset())

    async def _reset(self) -> None:
        client = SGLangClient(self.url, api_key=self.keys.api, admin_key=self.keys.admin)
        try:
            await client.control("/abort_request", {"rid": "", "abort_all": True})
            await client.resume()
            body = {"model_path": str(self.model), "weight_version": "default"}
            await client.control("/update_weights_from_disk", body)
            await client.flush_cache()
        finally:
            await client.close()

    def processes(self) -> list[psutil.Process]:
        """Return the server's processes, the one that listens last."""
        port = urlsplit(self.url).port
        (listener,) = {
            each.pid
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr.port == port and each.pid
        }
        server = psutil.Process(listener)
        return [*server.children(recursive=True), server]

    def close(self) -> None:
        self._do(self._server.stop())
        self._end_thread()

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _end_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
