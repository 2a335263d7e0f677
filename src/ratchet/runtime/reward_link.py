"""One reward process as its worker sees it.

Consumes what scores and the environment; produces the process, rewards, and its end. Waits for its
answers, with a limit, and for its exit, which a file descriptor of the process tells. Who leaves a
group before its last answer, however that comes, leaves a process that is not `clean`: it may still
run the user's code, and only its end stops that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from ratchet.errors import RewardFailed
from ratchet.runtime.exits import when_exited
from ratchet.runtime.reward_wire import (
    MOST_ANSWER_BYTES,
    PREFIX,
    Build,
    Built,
    Failed,
    Refused,
    Scored,
    ScoreGroup,
    Stepped,
    TakeStep,
    encode,
)
from ratchet.tasks.base import Conversation, Step
from ratchet.types import Prompt

_START_S: Final = 120.0
"""In which the task must build: imports and data of the user's own."""
_END_S: Final = 6.0
"""In which the keeper has killed all, or never will."""
_LAST_S: Final = 1.0
_READ_BYTES: Final = 65536
_STDERR: Final = 2
_KEEPER: Final = (sys.executable, "-u", "-m", "ratchet.runtime.reward_keeper")

ReplyT = TypeVar("ReplyT", Scored, Stepped)


class StartFailed(Exception):  # noqa: N818 - reads as the event it reports
    """A process in which the task does not build; the text names the task."""


class _Ended(Exception):  # noqa: N818
    """The process is gone, or says what no reward process says."""


class RewardProcess:
    """A keeper and the process that it keeps.

    Args:
        build: what scores.
        env: the whole environment.
    """

    def __init__(self, build: Build, env: Mapping[str, str]) -> None:
        self._build = build
        self._env = dict(env)
        self._buffer = bytearray()
        self.clean = False
        """whether it may score a group"""

    @property
    def pid(self) -> int:
        """Of the keeper."""
        return self._keeper.pid

    async def start(self) -> None:
        """Start it, and wait until the task is built.

        Raises:
            StartFailed: if the task does not build.
            OSError: if there is no process to be had.
        """
        self._spawn()
        try:
            await self._start()
        except BaseException:
            await self.end()
            raise
        self.clean = True

    async def score(
        self, prompt: Prompt, answers: Sequence[str] | Sequence[Conversation], timeout_s: float
    ) -> list[float]:
        """Return one reward per answer of the policy, each within `timeout_s`.

        Raises:
            RewardFailed: with the reason.
        """
        request = ScoreGroup(prompt, tuple(answers))
        replies = await self._ask(request, prompt, len(answers), timeout_s, Scored)
        return [reply.reward for reply in replies]

    async def step(self, prompt: Prompt, conversation: Conversation, timeout_s: float) -> Step:
        """Return the environment's answer; raises as `score`."""
        (reply,) = await self._ask(TakeStep(prompt, conversation), prompt, 1, timeout_s, Stepped)
        return reply.step

    async def _ask(
        self,
        request: msgspec.Struct,
        prompt: Prompt,
        count: int,
        timeout_s: float,
        kind: type[ReplyT],
    ) -> list[ReplyT]:
        """Return `count` replies, each within `timeout_s`."""
        self.clean = False
        replies: list[ReplyT] = []
        try:
            await self._send(request, timeout_s)
            for _ in range(count):
                reply = await self._receive(kind | Failed, timeout_s)
                if isinstance(reply, Failed):
                    self.clean = reply.clean
                    raise RewardFailed(reply.text, reply.reason)
                replies.append(reply)
        except TimeoutError:
            msg = (
                f"the reward of prompt {prompt.prompt_id} did not return within"
                f" task.reward_timeout_s = {timeout_s:g} s, at answer {len(replies) + 1} of {count}"
            )
            raise RewardFailed(msg, "reward_timeout") from None
        except _Ended as error:
            await self.end()
            msg = f"the reward of prompt {prompt.prompt_id} ended its process: {error}{self._how()}"
            raise RewardFailed(msg, "reward_exited") from None
        self.clean = True
        return replies

    def kill(self) -> None:
        """Let the keeper kill all; does not wait."""
        self.clean = False
        with contextlib.suppress(OSError):  # it has gone first
            self._wire.shutdown(socket.SHUT_RDWR)

    async def end(self) -> None:
        """Kill, and wait until all are gone. Idempotent."""
        self.kill()
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.shield(self._exit)
        except TimeoutError:
            self._keeper.kill()
        finally:
            self._wire.close()
            # also when the loop ends: nothing may be left, and it takes but a moment
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._keeper.wait(_LAST_S)

    def _spawn(self) -> None:
        self._wire, theirs = socket.socketpair()
        self._wire.setblocking(False)
        self._exit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with theirs:
            try:
                self._keeper = subprocess.Popen(  # noqa: S603 - our own module
                    [*_KEEPER, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=_STDERR,  # what a user's code prints belongs with the errors
                    env=self._env,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
            except OSError:
                self._wire.close()
                raise
        when_exited(self._keeper.pid, self._exited)

    async def _start(self) -> None:
        try:
            await self._send(self._build, _START_S)
            answer = await self._receive(Built | Refused, _START_S)
        except TimeoutError:
            msg = f"the task did not build within {_START_S:g} s in a process that scores"
            raise StartFailed(msg) from None
        except _Ended as error:
            await self.end()
            msg = f"the task ended the process that was to score: {error}{self._how()}"
            raise StartFailed(msg) from None
        if isinstance(answer, Refused):
            raise StartFailed(answer.text)

    def _exited(self) -> None:
        self._keeper.wait()
        if not self._exit.done():
            self._exit.set_result(None)

    def _how(self) -> str:
        code = self._keeper.returncode
        if code is None:
            return ""
        return f"signal {code - 128}" if code > 128 else f"exit code {code}"

    async def _send(self, message: msgspec.Struct, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.sock_sendall(self._wire, encode(message))
        except ConnectionError:
            raise _Ended from None

    async def _receive(self, kind: Any, timeout_s: float) -> Any:
        async with asyncio.timeout(timeout_s):
            while (body := self._frame()) is None:
                await self._read()
        try:
            return msgspec.msgpack.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise _Ended(f"it wrote into its answers: {error}; ") from None

    def _frame(self) -> bytes | None:
        if len(self._buffer) < PREFIX.size:
            return None
        (size,) = PREFIX.unpack_from(self._buffer)
        if size > MOST_ANSWER_BYTES:
            raise _Ended(f"an answer of {size} bytes; ")
        end = PREFIX.size + size
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[PREFIX.size : end])
        del self._buffer[:end]
        return body

    async def _read(self) -> None:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._wire, _READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise _Ended
        self._buffer += data
