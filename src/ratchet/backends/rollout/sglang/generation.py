"""The requests of one engine: held, sent, checked, and taken back.

Consumes prompts, produces completions. A request waits here while the engine has no version or is
paused; the servers then have it until it ends, also across pauses and new weights. What comes back
waits until every version in it is decided: a load is proved on running servers, so tokens can be of
weights that are refused a moment later. A cancelled request is taken out of the batch by name.

Unblocked by `serve`, `resume`, the servers' answers, the end of a proof, `fail` and `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from ratchet.backends.rollout.base import Completion, EngineStats, SamplingParams
from ratchet.backends.rollout.sglang.answers import (
    Answer,
    Limits,
    NoVersion,
    completion_of,
    decode_answer,
    request_body,
)
from ratchet.backends.rollout.sglang.client import CallFailed, CallRefused
from ratchet.errors import GenerationFailed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from ratchet.backends.rollout.sglang.client import SGLangClient
    from ratchet.types import PolicyVersion


_ABORT_S: Final = 5.0
"""For a server to take a request out; it does so by itself when the connection is gone."""

_Call: TypeAlias = "asyncio.Task[Completion]"


class _Serving(NamedTuple):
    """What requests are sent under, from one `serve` to the next."""

    version: PolicyVersion
    serial: int
    salt: str
    fields: Mapping[str, Any]


class Generation:
    """Everything that one engine has to complete. Lives on one event loop."""

    def __init__(
        self,
        client: SGLangClient,
        servers: Sequence[SGLangClient],
        *,
        limits: Limits,
        end_ids: Collection[int],
        timeout_s: float,
        decided: Callable[[PolicyVersion], Awaitable[bool]],
        lost: Callable[[str], None],
    ) -> None:
        """Hold every request until `serve`.

        Args:
            client: takes requests: the server, or the router in front of `servers`.
            servers: where a request may be.
            limits: of the servers.
            end_ids: end a completion.
            timeout_s: for the servers to answer.
            decided: returns whether a version is the run's, proved at this engine; waits for a
                proof that is under way.
            lost: told when a server answers with other weights than it should hold.
        """
        self._client = client
        self._servers = tuple(servers)
        self.limits = limits
        self._end_ids = tuple(sorted(end_ids))
        self._timeout_s = timeout_s
        self._decided = decided
        self._lost = lost
        self._name = uuid.uuid4().hex[:12]
        self._numbered = 0
        self._serving: _Serving | None = None
        self._serials: dict[PolicyVersion, int] = {}
        self._is_paused = False
        self._ready = asyncio.Event()
        self._calls: set[_Call] = set()
        self._sent: set[_Call] = set()  # without fields: answered by what the servers hold
        self._failed: dict[_Call, str] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._over: str | None = None
        self._running = 0
        self._waiting = 0
        self._generated_tokens = 0
        self._busy_s, self._paused_s = 0.0, 0.0
        self._counted_until = 0.0

    # --- requests

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Generate one completion; see `RolloutEngine.generate`."""
        if self._over is not None:
            raise GenerationFailed(self._over)
        self.limits.check(prompt_ids, params)
        call = asyncio.create_task(self._complete(prompt_ids, params))
        self._calls.add(call)
        call.add_done_callback(self._ended)
        try:
            await asyncio.wait([call])
        except asyncio.CancelledError:
            call.cancel()
            self._failed.pop(call, None)
            raise
        if (reason := self._failed.pop(call, None)) is not None:
            raise GenerationFailed(reason)
        return call.result()

    def stats(self) -> EngineStats:
        """Return the running totals. Tokens count when their completion is there; the engine is
        busy while the servers have a request and go on.
        """
        self._count()
        return EngineStats(
            busy_s=self._busy_s,
            paused_s=self._paused_s,
            generated_tokens=self._generated_tokens,
            running=self._running,
            waiting=self._waiting,
        )

    # --- what the weights say

    def serve(self, version: PolicyVersion, fields: Mapping[str, Any] | None = None) -> None:
        """Send requests: the servers hold a version, proved.

        Args:
            version: of the weights.
            fields: that a request needs to be answered by it; then all of its tokens are, whatever
                is loaded meanwhile.
        """
        self._count()
        self._numbered += 1
        serial = self._serials[version] = self._numbered
        self._serving = _Serving(version, serial, f"{self._name}-{serial}", fields or {})
        self._settle()

    @property
    def sends(self) -> PolicyVersion | None:
        """The version that requests are sent under; None while they are held."""
        return None if self._serving is None or self._is_paused else self._serving.version

    def hold(self) -> None:
        """Send no more requests: the servers hold no version. What they have stays there."""
        self._count()
        self._serving = None
        self._settle()

    def pause(self) -> None:
        """Send no more requests until `resume`."""
        self._count()
        self._is_paused = True
        self._settle()

    def resume(self) -> None:
        """Send requests again, as soon as there is a version."""
        self._count()
        self._is_paused = False
        self._settle()

    def refuse(self, reason: str) -> None:
        """Fail what the servers have and did not name: it may have tokens of refused weights."""
        self.hold()
        self._fail_calls(self._sent, reason)

    def fail(self, reason: str) -> None:
        """Fail everything, now and from here on."""
        self._over = self._over or reason
        self.hold()
        self._fail_calls(self._calls, reason)

    async def close(self) -> None:
        """Fail everything, and wait until the servers were told. Idempotent."""
        self.fail("the engine was closed")
        await asyncio.gather(*self._calls, return_exceptions=True)  # they leave aborts behind
        await asyncio.gather(*self._aborts)

    # --- inside

    async def _complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        serving = await self._version()
        self._numbered += 1
        rid = f"{self._name}-{self._numbered}"
        body = request_body(
            rid,
            prompt_ids,
            params,
            end_ids=self._end_ids,
            salt=serving.salt,
            fields=serving.fields,
        )
        call = asyncio.current_task()
        assert call is not None  # noqa: S101 - `generate` makes a task of this
        if not serving.fields:
            self._sent.add(call)
        answer = await self._ask(rid, body)
        self._generated_tokens += len(answer.output_ids)
        try:
            completion = completion_of(answer, params, serving.version if serving.fields else None)
        except NoVersion as error:
            self._lost(str(error))
            raise
        await self._check_versions(completion, serving)
        return completion

    async def _version(self) -> _Serving:
        """Return without giving way to others between the check and the return."""
        self._waiting += 1
        try:
            while self._serving is None or self._is_paused:
                await self._ready.wait()
        finally:
            self._waiting -= 1
        return self._serving

    async def _ask(self, rid: str, body: Mapping[str, Any]) -> Answer:
        self._count()
        self._running += 1
        try:
            answer: Answer = await self._client.generate(
                body, timeout_s=self._timeout_s, decode=decode_answer
            )
        except asyncio.CancelledError:
            self._abort(rid)
            raise
        except CallFailed as error:
            if not isinstance(error, CallRefused):
                self._abort(rid)
            raise GenerationFailed(str(error)) from error
        finally:
            self._count()
            self._running -= 1
        return answer

    async def _check_versions(self, completion: Completion, serving: _Serving) -> None:
        for span in completion.spans:
            if not await self._decided(span.version):
                msg = f"tokens were generated by version {span.version}, which was not proved here"
                if span.version not in self._serials:
                    self._lost(msg)
                raise GenerationFailed(msg)
            if self._serials.get(span.version, serving.serial) < serving.serial:
                msg = (
                    f"tokens were generated by version {span.version}, and the request was sent"
                    f" under version {serving.version}"
                )
                self._lost(msg)
                raise GenerationFailed(msg)

    def _abort(self, rid: str) -> None:
        """Take a request out of whichever batch it is in, later on."""
        for server in self._servers:
            task = asyncio.create_task(_abort(server, rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def _fail_calls(self, calls: Collection[_Call], reason: str) -> None:
        for call in calls:
            if not call.cancelling() and call.cancel():
                self._failed[call] = reason

    def _ended(self, call: _Call) -> None:
        self._calls.discard(call)
        self._sent.discard(call)
        if not call.cancelled():
            call.exception()  # retrieved: whoever waited for it may be cancelled

    def _settle(self) -> None:
        if self._serving is None or self._is_paused:
            self._ready.clear()
        else:
            self._ready.set()

    def _count(self) -> None:
        """Account for the time since the last change."""
        now = asyncio.get_running_loop().time()
        elapsed, self._counted_until = now - (self._counted_until or now), now
        if self._is_paused:
            self._paused_s += elapsed
        elif self._running and self._serving is not None:
            self._busy_s += elapsed


async def _abort(server: SGLangClient, rid: str) -> None:
    with contextlib.suppress(CallFailed):
        await server.abort(rid, timeout_s=_ABORT_S)
