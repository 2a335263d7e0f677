"""SGLang's endpoints as 0.5.23 answers them, without a model: for error paths, in the same loop.

Tokens come one every `step_s` from a hash of the prompt, the position and the version; a pause
holds them, an update in mid request splits the spans. What real weights, a real tokenizer or a
real group would refuse is not here: that is in tests/sglang.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from tests.helpers.sglang_answers import Running, answer_of, broken, next_token, nth, said

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
CONTROL = {
    "/abort_request", "/pause_generation", "/continue_generation", "/flush_cache",
    "/init_weights_update_group", "/destroy_weights_update_group", "/begin_weight_update",
    "/end_weight_update", "/update_weights_from_distributed", "/update_weight_version",
    "/load_lora_adapter", "/unload_lora_adapter",
}  # fmt: skip


@dataclass
class SGLangStub:
    """One server; attributes are its state, and a test may change them."""

    api_key: str | None = None
    admin_key: str | None = None
    vocabulary: int = 64
    eos: frozenset[int] = frozenset()
    context: int = 4096
    step_s: float = 0.001
    prompt_logprob: float = -1.0
    """of every token of a prompt that is scored"""
    ignores_temperature: bool = False
    """in the log probabilities of ids that are asked for by name"""
    sglang_version: str = "0.5.23"
    architecture: str = "Qwen3ForCausalLM"
    dtype: str = "float32"
    facts: dict[str, Any] = field(default_factory=dict)
    """more of /server_info"""
    behind: Sequence[str] = ()
    """URLs that it tells as a router"""
    weight_version: str = "default"
    paused: bool = False
    updating: bool = False
    groups: set[str] = field(default_factory=set)
    adapters: dict[str, str] = field(default_factory=dict)
    running: dict[str, Running] = field(default_factory=dict)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """(path, body) of every call in order"""
    answers: dict[str, tuple[int, Any]] = field(default_factory=dict)
    """path -> (status, body) instead of what it does"""
    hung: set[str] = field(default_factory=set)
    """paths that take a call and never answer"""
    dies: Counter[str] = field(default_factory=Counter)
    """path -> how many of its next calls break in the middle of the answer"""
    url: str = ""

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._transports: set[int] = set()

    @property
    def connections(self) -> int:
        """Return how many there have been."""
        return len(self._transports)

    # --- life

    @asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[SGLangStub]:
        """Listen on loopback until the end of the block; then every connection breaks."""
        app = web.Application(middlewares=[self._gate], client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._route)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.hung.clear()
            for request in self.running.values():
                request.aborted = True
            await self.notify()
            await runner.cleanup()

    async def notify(self) -> None:
        """Wake what waits for a change that a test made to an attribute."""
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a call, the end of a request, or what a test does, to make it true."""
        async with self._changed:
            await self._changed.wait_for(condition)

    def called(self, path: str) -> list[Any]:
        """Return the bodies of the calls of one path, in order."""
        return [body for called, body in self.calls if called == path]

    async def until_called(self, path: str, times: int = 1) -> None:
        """Wait until a path has been called so often."""
        await self.until(lambda: len(self.called(path)) >= times)

    @web.middleware
    async def _gate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        body = await request.json() if request.can_read_body else None
        self.calls.append((path, body))
        self._transports.add(id(request.transport))
        await self.notify()
        if not self._authorised(request):
            return web.json_response({"error": "Unauthorized"}, status=401)
        if path in self.hung:
            await self.until(lambda: path not in self.hung)
        if self.dies[path] > 0:
            self.dies[path] -= 1
            return await broken(request)
        if path in self.answers:
            status, answer = self.answers[path]
            return web.json_response(answer, status=status)
        return await handler(request)

    def _authorised(self, request: web.Request) -> bool:
        if request.path == "/health":
            return True
        key = self.api_key
        if request.path in CONTROL:
            key = self.admin_key or self.api_key
        return key is None or request.headers.get("Authorization") == f"Bearer {key}"

    async def _route(self, request: web.Request) -> web.StreamResponse:
        name = "_" + request.path.strip("/")
        handler = getattr(self, name, None)
        if handler is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json() if await request.read() else {}
        response: web.StreamResponse = await handler(body)
        return response

    # --- generation

    async def _generate(self, body: dict[str, Any]) -> web.Response:
        ids = body["input_ids"]
        if ids and isinstance(ids[0], list):
            answers = [await self._one(nth(body, index)) for index in range(len(ids))]
            return web.json_response(answers)
        if len(ids) >= self.context:
            text = f"The input ({len(ids)} tokens) is longer than the model's context length"
            return web.json_response({"error": {"message": text}}, status=400)
        return web.json_response(await self._one(body))

    async def _one(self, body: dict[str, Any]) -> dict[str, Any]:
        rid = body.get("rid") or f"stub-{len(self.calls)}"
        request = self.running[rid] = Running(body)
        sampling = body["sampling_params"]
        limit = sampling["max_new_tokens"]
        reason: dict[str, Any] = {"type": "length", "length": limit}
        try:
            while len(request.tokens) < limit and not request.aborted:
                await self._unpaused(request)
                if request.aborted:
                    break
                token = next_token(request, self.weight_version, self.vocabulary)
                request.tokens.append(token)
                request.versions.append(self.weight_version)
                if token in self.eos and not sampling.get("ignore_eos"):
                    reason = {"type": "stop", "matched": token}
                    break
                await asyncio.sleep(self.step_s)
        finally:
            self.running.pop(rid, None)
            await self.notify()
        if request.aborted:
            reason = {"type": "abort", "message": "Abort in the stub"}
        return answer_of(
            rid,
            request,
            reason,
            self.weight_version,
            prompt_logprob=self.prompt_logprob,
            ignores_temperature=self.ignores_temperature,
        )

    async def _unpaused(self, request: Running) -> None:
        if self.paused:
            await self.until(lambda: not self.paused or request.aborted)

    async def _abort_request(self, body: dict[str, Any]) -> web.Response:
        for rid, request in self.running.items():
            if body.get("abort_all") or rid == body.get("rid"):
                request.aborted = True
        await self.notify()
        return web.Response()

    async def _pause_generation(self, body: dict[str, Any]) -> web.Response:
        self.paused = True
        for request in self.running.values():
            request.aborted |= body["mode"] == "abort"
            request.retractions += body["mode"] == "retract"
        await self.notify()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue_generation(self, body: dict[str, Any]) -> web.Response:
        self.paused = False
        await self.notify()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, body: dict[str, Any]) -> web.Response:
        retracted = self.paused and all(each.retractions for each in self.running.values())
        if self.running and not retracted:
            return web.Response(text="Flush cache failed.\n", status=400)
        return web.Response(text="Cache flushed.\n")

    # --- weights

    async def _begin_weight_update(self, body: dict[str, Any]) -> web.Response:
        if self.updating:
            return said(False, "A weight update session is already open")
        if not self.paused:
            await self.until(lambda: not self.running)
        self.updating = True
        return said(True, "Succeeded.")

    async def _end_weight_update(self, body: dict[str, Any]) -> web.Response:
        if not self.updating:
            return said(False, "No weight update session is open")
        self.updating = False
        return said(True, "Succeeded.")

    async def _init_weights_update_group(self, body: dict[str, Any]) -> web.Response:
        if body["group_name"] in self.groups:
            return said(False, f"group {body['group_name']} exists")
        self.groups.add(body["group_name"])
        return said(True, "Succeeded to initialize custom process group.")

    async def _destroy_weights_update_group(self, body: dict[str, Any]) -> web.Response:
        if body["group_name"] not in self.groups:
            return said(False, "The group to be destroyed does not exist.")
        self.groups.remove(body["group_name"])
        return said(True, "Succeeded to destroy custom process group.")

    async def _update_weights_from_distributed(self, body: dict[str, Any]) -> web.Response:
        if not self.updating:
            return said(False, "update_weights_from_distributed needs begin_weight_update")
        if body["group_name"] not in self.groups:
            return said(False, f"Group {body['group_name']} not in the list of groups")
        self.weight_version = body.get("weight_version") or self.weight_version
        return said(True, "Succeeded to update parameter online.")

    async def _update_weight_version(self, body: dict[str, Any]) -> web.Response:
        if body.get("abort_all_requests", True):
            await self._abort_request({"abort_all": True})
        self.weight_version = body["new_version"]
        return said(True, f"Weight version updated to {self.weight_version}")

    async def _load_lora_adapter(self, body: dict[str, Any]) -> web.Response:
        if body["lora_name"] in self.adapters:
            return said(False, f"LoRA with name {body['lora_name']} already exists")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return said(True, "")

    async def _unload_lora_adapter(self, body: dict[str, Any]) -> web.Response:
        if self.adapters.pop(body["lora_name"], None) is None:
            return said(False, f"LoRA with name {body['lora_name']} does not exist")
        return said(True, "")

    # --- what it is

    async def _health(self, body: dict[str, Any]) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    _ready = _health

    async def _model_info(self, body: dict[str, Any]) -> web.Response:
        facts = {"weight_version": self.weight_version, "is_generation": True}
        return web.json_response(facts | {"architectures": [self.architecture]})

    async def _server_info(self, body: dict[str, Any]) -> web.Response:
        facts = {"version": self.sglang_version, "dtype": self.dtype, "tp_size": 1}
        facts |= {"max_req_input_len": self.context - 6, "dp_size": 1, "pp_size": 1, "nnodes": 1}
        return web.json_response(facts | self.facts)

    # --- as a router

    async def _workers(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"workers": [{"url": url} for url in self.behind]})
