"""The parent of one SGLang server: `python -m ratchet.backends.rollout.sglang.keeper`.

Consumes one line of JSON (`Task`) on standard input, and then its end, which is the order to stop,
or the end of the worker, however it came, kill -9 included. Produces the server, with a private
folder for all its temporary files, and on standard output one line of JSON when all of it is gone:
{"code": exit code, or minus the signal} or {"error": why there is no server}.

Waits for the end of the server or of standard input. Then it kills the server and whatever that has
started, as a subreaper also what has lost its parent, removes the folder, and ends. The server is
not asked to end: it would take its time to drain requests that nobody waits for any more. The keys
stand in a file of mode 0600 in the folder, as argv and the environment are open to other users; and
as SGLang prints all its arguments, its output comes through here, where they are taken out.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import IO, Final, TypedDict

from ratchet.private_folder import private_folder
from ratchet.subreaper import become_subreaper, die_with_parent, end_all

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_READ_BYTES: Final = 65536
_LINE_BYTES: Final = 2**20
"""A longer line is written in pieces."""


_NOT_PASSED_ON: Final = re.compile(
    r"SGLANG_(RETURN_ORIGINAL_LOGPROB|SANITIZE_NAN_LOGITS|NGRAM_FORCE_GREEDY_VERIFY"
    r"|MAX_NEW_TOKENS_LIMIT|(SIMULATE|TEST|KV_CANARY_PERTURB)_.*)"
)
"""Variables that make tokens or log probabilities something else than the trainer takes them for:
without the temperature, of NaN, of a made-up acceptance. Named one by one, as SGLang reads hundreds
of others, which a user sets for his hardware.
"""


class Task(TypedDict):
    """What to start."""

    argv: list[str]
    config: dict[str, str]
    """arguments that no one else may see"""
    log: str
    """path; the server's output is added to it"""


def main() -> None:
    """Start, wait, and clear up."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    become_subreaper()
    line = sys.stdin.buffer.readline()
    if not line:
        return
    words = json.dumps(_keep(json.loads(line)))
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


def _keep(task: Task) -> dict[str, int | str]:
    folder = private_folder("keeper")
    try:
        argv = list(task["argv"])
        if task["config"]:
            argv += ["--config", str(_write_config(folder, task["config"]))]
        with Path(task["log"]).open("ab", buffering=0) as file:
            environment = _environment(file)
            server = _start(argv, {**environment, "TMPDIR": str(folder)})
            try:
                _wait(server, Log(file, task["config"].values()))
                # not reaped yet: as long as there is a zombie, nobody else has the number of its
                # group
                ended = os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            finally:
                end_all(server.pid)
            return {"code": -signal.SIGKILL if ended is None else _code(ended)}
    except OSError as error:
        return {"error": str(error)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _code(ended: os.waitid_result) -> int:
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _write_config(folder: Path, config: dict[str, str]) -> Path:
    path = folder / "config.yaml"
    path.touch(mode=0o600)
    path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return path


def _environment(log: io.RawIOBase) -> dict[str, str]:
    """Return our own without what would make results wrong; the log says what was left out."""
    refused = sorted(filter(_NOT_PASSED_ON.fullmatch, os.environ))
    for name in refused:
        log.write(f"ratchet: {name} is not passed on: results would be of another kind\n".encode())
    return {name: value for name, value in os.environ.items() if name not in refused}


def _start(argv: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - the user's own command
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env=environment,
        start_new_session=True,
        preexec_fn=partial(_prepare, os.getpid()),  # safe: there is no thread here
    )


def _prepare(keeper: int) -> None:
    die_with_parent()
    if os.getppid() != keeper:
        os._exit(1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _wait(server: subprocess.Popen[bytes], log: Log) -> None:
    """Write its output down until it ends, or is to end."""
    assert server.stdout is not None  # noqa: S101 - a pipe
    os.set_blocking(server.stdout.fileno(), False)
    ended = os.pidfd_open(server.pid)
    poll = select.poll()
    poll.register(ended, select.POLLIN)
    poll.register(sys.stdin.fileno(), select.POLLIN)
    poll.register(server.stdout.fileno(), select.POLLIN)
    while True:
        ready = {fd for fd, _ in poll.poll()}
        if server.stdout.fileno() in ready and not log.take(server.stdout):
            poll.unregister(server.stdout.fileno())
        if ready & {ended, sys.stdin.fileno()}:
            break
    while log.take(server.stdout):  # not to the end: what it has started may hold the pipe open
        pass
    log.close()
    os.close(ended)


class Log:
    """A file of lines without the keys."""

    def __init__(self, file: io.RawIOBase, secrets: Iterable[str]) -> None:
        self._file = file
        # the longest first: another may be a part of it
        self._secrets = sorted((secret.encode() for secret in secrets), key=len, reverse=True)
        self._line = b""

    def take(self, output: IO[bytes]) -> bool:
        """Take what is there; whether there may be more."""
        data = output.read(_READ_BYTES)
        whole, end, rest = (self._line + (data or b"")).rpartition(b"\n")
        self._line = rest
        self._write(whole + end)
        if len(rest) > _LINE_BYTES:
            self.close()
        return bool(data)

    def close(self) -> None:
        """Write what is left."""
        rest, self._line = self._line, b""
        self._write(rest)

    def _write(self, lines: bytes) -> None:
        for secret in self._secrets:
            lines = lines.replace(secret, b"***")
        with contextlib.suppress(OSError):  # a full disk costs lines of the log, not the server
            self._file.write(lines)


if __name__ == "__main__":
    main()
