"""Inside a reward process: the one place where a user's reward runs, a group at a time.

Consumes `Build`, then requests, on the wire; produces `Built` or `Refused`, then their answers.
Waits for the user's code, without a limit: the worker has that, and kills. Standard output and
error are the worker's log of errors; standard input is empty.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from ratchet.config import TaskConfig
from ratchet.errors import RewardFailed, UserError
from ratchet.runtime.judge import judge, take_step
from ratchet.runtime.reward_keeper import command_line
from ratchet.runtime.reward_wire import (
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
from ratchet.subreaper import children
from ratchet.tasks.base import Task
from ratchet.tasks.registry import build_task
from ratchet.types import Prompt

_NOT_CLEAN: Final = frozenset({"reward_memory", "reward_forked"})
"""What the code may have kept makes the next group fail too: a full heap, a process."""
_CHECKS: Final = 5
_ENDING_S: Final = 0.01


def serve(wire: int, keeper: int) -> NoReturn:
    """Score until the worker closes the wire."""
    with socket.socket(fileno=wire) as channel:
        task = _build(channel, _receive(channel, Build))
        if task is not None:
            scorer = _Scorer(task, keeper)
            channel.sendall(encode(Built()))
            while True:
                for answer in scorer.answers(_receive(channel, ScoreGroup | TakeStep)):
                    channel.sendall(answer)
    os._exit(0)


class _Scorer:
    def __init__(self, task: Task, keeper: int) -> None:
        self._task = task
        self._keeper = keeper
        self._pid = os.getpid()
        self._helpers = self._copies()
        self._forked = False
        os.register_at_fork(after_in_parent=self._note_fork)

    def answers(self, request: ScoreGroup | TakeStep) -> Iterator[bytes]:
        """Yield the frame of each answer, as it comes; the last one vouches for the request."""
        try:
            if isinstance(request, TakeStep):
                yield self._step(request)
            else:
                yield from self._rewards(request)
        except RewardFailed as error:
            clean = error.reason not in _NOT_CLEAN and not self._forked
            yield encode(Failed(error.reason, str(error), clean))

    def _rewards(self, request: ScoreGroup) -> Iterator[bytes]:
        last = len(request.answers) - 1
        for index, answer in enumerate(request.answers):
            with self._in_one_process():
                reward = judge(self._task, request.prompt, answer)
            if index == last:
                self._check_forks(request.prompt)
            yield encode(Scored(reward))

    def _step(self, request: TakeStep) -> bytes:
        with self._in_one_process():
            step = take_step(self._task, request.prompt, request.conversation)
        self._check_forks(request.prompt)
        try:
            return encode(Stepped(step))
        except Exception as error:
            msg = (
                f"the environment of prompt {request.prompt.prompt_id} returned a Step that"
                f" cannot be sent: {error}; its state is numbers, text, bytes, lists and tables"
            )
            raise RewardFailed(msg, "reward_invalid") from error

    @contextlib.contextmanager
    def _in_one_process(self) -> Iterator[None]:
        try:
            yield
        finally:
            if os.getpid() != self._pid:  # the reward has forked, and this is the other one
                os._exit(0)

    def _note_fork(self) -> None:
        self._forked = True

    def _copies(self) -> set[int]:
        """Return the processes that were forked from this one, orphans included, and run on.

        A program that was started has a command line of its own; what has ended has none.
        """
        started = (children(self._pid) | children(self._keeper)) - {self._pid}
        same = {command_line(self._pid), b""}
        return {pid for pid in started if command_line(pid) in same}

    def _check_forks(self, prompt: Prompt) -> None:
        if not self._forked:
            return
        self._forked = False
        for _ in range(_CHECKS):
            left = self._copies() - self._helpers
            if not left:
                return
            time.sleep(_ENDING_S)  # an orphan that has ended is reaped in a moment
        msg = (
            f"the reward of prompt {prompt.prompt_id} forked, and left {len(left)} process(es)"
            " behind: wait for them before it returns, or fork once, when the task is built"
        )
        raise RewardFailed(msg, "reward_forked")


def _build(channel: socket.socket, build: Build) -> Task | None:
    sys.path[:] = build.path
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (build.max_bytes, build.max_bytes))
    # where memory runs out, it is a reward's that is taken, not the trainer's
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    config = TaskConfig.model_validate_json(build.task)
    try:
        return build_task(config, build.seed)
    except UserError as error:
        text = str(error)
    except BaseException as error:  # noqa: BLE001 - told to the worker, which ends the run
        traceback.print_exc()
        text = f"task.name = {config.name!r} does not build: {type(error).__name__}: {error}"
    channel.sendall(encode(Refused(text)))
    return None


def _receive(channel: socket.socket, message: Any) -> Any:
    (size,) = PREFIX.unpack(_exactly(channel, PREFIX.size))
    return msgspec.msgpack.decode(_exactly(channel, size), type=message)


def _exactly(channel: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = channel.recv_into(view)
        if count == 0:  # the worker is gone; the keeper kills, in a moment
            os._exit(0)
        view = view[count:]
    return data
