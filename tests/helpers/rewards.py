"""Rewards that do what the prompt says, most of it bad. Imported by the processes that score."""

from __future__ import annotations

import functools
import math
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ratchet.tasks.base import Conversation, Split, Step
from ratchet.types import Prompt


def reward(prompt: Prompt, completion: str) -> Any:
    """Do what the prompt says: "WORD", or "WORD" with the completion as its argument."""
    return _DO[prompt.text](completion)


def reward_by_id(prompt: Prompt, completion: str) -> Any:
    """Do what the prompt's id says: "WORD-NUMBER"; "good" is a reward that differs."""
    word = prompt.prompt_id.partition("-")[0]
    return float(len(set(completion))) if word == "good" else _DO[word](completion)


def _raise(text: str) -> None:
    raise ValueError(text)


def _loop(entered: str) -> None:
    if entered.startswith("/"):
        Path(entered).touch()
    while True:
        time.sleep(0.001)


def _loop_deaf(entered: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _loop(entered)


def _fork(_: str) -> float:
    os.fork()
    return 1.0


@functools.cache
def _sandbox(_: str) -> float:
    """A program that serves all calls."""
    return subprocess.Popen(["sleep", "1000"]).pid


def _fork_and_wait(_: str) -> float:
    pid = os.fork()
    if pid == 0:
        os._exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _daemon(pid_file: str) -> float:
    """Leave a process that has a session of its own and no parent."""
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            Path(pid_file).write_text(str(os.getpid()), encoding="ascii")
            while True:
                time.sleep(10)
        os._exit(0)
    os.waitpid(middle, 0)
    while not (Path(pid_file).exists() and Path(pid_file).read_text(encoding="ascii")):
        time.sleep(0.001)
    return 1.0


def _daemon_and_loop(pid_file: str) -> None:
    _daemon(pid_file)
    while True:
        time.sleep(10)


_KEPT: list[bytearray] = []


def _leak(_: str) -> float:
    _KEPT.append(bytearray(64 << 20))
    return 1.0


def _scribble(_: str) -> float:
    for fd in range(3, 4096):
        try:
            os.write(fd, b"\x04\x00\x00\x00junk")
        except OSError:  # not open, or not for writing
            continue
    return 1.0


def _print(text: str) -> float:
    print(text)  # noqa: T201
    os.system(f"echo {text}-of-a-shell")  # noqa: S605
    return 1.0


def _descriptors(_: str) -> float:
    return float(len(os.listdir("/proc/self/fd")) - 1)  # noqa: PTH208 - its own is open as well


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def _mute(_: str) -> None:
    raise _MuteError


_DO: dict[str, Callable[[str], Any]] = {
    "number": float,
    "pid": lambda _: os.getpid(),
    "raise": _raise,
    "mute": _mute,
    "exit": lambda _: sys.exit(3),
    "_exit": lambda _: os._exit(3),
    "die": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "killgroup": lambda _: os.killpg(0, signal.SIGKILL),
    "loop": _loop,
    "loop-at-three": lambda text: _loop(text) if text == "3" else 1.0,
    "deaf": _loop_deaf,
    "fork": _fork,
    "fork-and-wait": _fork_and_wait,
    "sandbox": _sandbox,
    "daemon": _daemon,
    "daemon-loop": _daemon_and_loop,
    "memory": lambda _: float(len(bytearray(10 << 30))),
    "leak": _leak,
    "none": lambda _: None,
    "nan": lambda _: math.nan,
    "inf": lambda _: math.inf,
    "string": lambda _: "1.0",
    "huge": lambda _: 10**400,
    "scribble": _scribble,
    "print": _print,
    "descriptors": _descriptors,
    "env": lambda name: float(name in os.environ),
    "cores": lambda _: resource.getrlimit(resource.RLIMIT_CORE)[0],
    "stdin": lambda _: len(sys.stdin.read()),
    "run": lambda _: os.system("true"),  # noqa: S605
}


class Guessing:
    """A task of several turns: the environment counts the turns, in the conversation alone."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [Prompt(f"{split}{n}", f"{split}{n}") for n in range(4)]

    def score(self, prompt: Prompt, completion: str) -> float:
        raise AssertionError("a conversation is scored as a whole")

    def max_turns(self, prompt: Prompt) -> int:
        return 3

    def step(self, prompt: Prompt, conversation: Conversation) -> Any:
        match conversation.turns[-1]:
            case "nothing":
                return None
            case "unsendable":
                return Step("more", state=object())
        return Step("more", state=(conversation.state or 0) + 1)

    def score_conversation(self, prompt: Prompt, conversation: Conversation) -> float:
        return float(conversation.state or 0)


class Unbuildable:
    """A task that cannot be made where HOPE is not set."""

    def __init__(self) -> None:
        if "HOPE" not in os.environ:
            raise RuntimeError("abandoned")
