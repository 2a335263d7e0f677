import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.contextvars import bound_contextvars

from ratchet.errors import UserError
from ratchet.observability.logs import REDACTED, BoundLog, configure_logging, redact
from ratchet.types import RoleInfo

WALL = 1_700_000_000.25


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trainer-0.jsonl"


@pytest.fixture
def log(path: Path) -> BoundLog:
    return configure_logging(path, role="trainer", run="run-1", wall_time=lambda: WALL)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line(log: BoundLog, path: Path) -> None:
    log.info("step_trained", step=3, reward=0.5)
    opened, line = lines(path)
    assert line == {
        "timestamp": "2023-11-14T22:13:20.250000Z",
        "level": "info",
        "event": "step_trained",
        "role": "trainer",
        "pid": os.getpid(),
        "step": 3,
        "reward": 0.5,
    }
    assert list(line)[:3] == ["timestamp", "level", "event"]
    assert (opened["event"], opened["run"]) == ("log_opened", "run-1")


def test_what_is_bound_is_on_each_line_of_that_log_only(log: BoundLog, path: Path) -> None:
    bound = log.bind(worker="rollout-1").bind(epoch=2)
    with bound_contextvars(trace_id="t1", version=7):
        bound.info("a")
    log.info("b")
    a, b = lines(path)[1:]
    assert {name: a[name] for name in ("worker", "epoch", "trace_id", "version")} == {
        "worker": "rollout-1",
        "epoch": 2,
        "trace_id": "t1",
        "version": 7,
    }
    assert not {"worker", "epoch", "trace_id", "version"} & b.keys()


def test_fields_cannot_forge_time_and_level(log: BoundLog, path: Path) -> None:
    log.error("a", level="debug", timestamp="never")
    line = lines(path)[1]
    assert (line["level"], line["timestamp"][:4]) == ("error", "2023")
    assert (line["level_"], line["timestamp_"]) == ("debug", "never")


@pytest.mark.parametrize(
    ("level", "written"), [("debug", "diwe"), ("info", "iwe"), ("warning", "we"), ("error", "e")]
)
def test_levels(path: Path, level: str, written: str) -> None:
    log = configure_logging(path, role="trainer", run="run-1", level=level)
    log.debug("d")
    log.info("i")
    log.warning("w")
    log.error("e")
    events = [line["event"] for line in lines(path)] if path.exists() else []
    assert "".join(event for event in events if len(event) == 1) == written


def test_an_unknown_level_and_a_missing_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="log level 'loud' is not known; use one of debug, info"):
        configure_logging(None, role="trainer", run="run-1", level="loud")
    with pytest.raises(UserError, match=r"cannot open the log file .*nowhere"):
        configure_logging(tmp_path / "nowhere" / "a.jsonl", role="trainer", run="run-1")


@pytest.mark.parametrize(
    "give", [lambda error: error, lambda _: True, lambda error: (type(error), error, None)]
)
def test_an_exception_is_text_with_its_traceback(
    log: BoundLog, path: Path, give: Callable[[Exception], Any]
) -> None:
    try:
        raise ValueError("boom")
    except ValueError as error:
        log.error("child_failed", exc_info=give(error))  # noqa: TRY400 - not a logging.Logger
    line = lines(path)[1]
    assert line["exception"].endswith("ValueError: boom")
    assert "exc_info" not in line


def test_values_that_json_does_not_have(log: BoundLog, path: Path) -> None:
    log.info("a", nan=float("nan"), path=Path("/x"), role_info=RoleInfo("trainer", "t", "i"))
    endless: list[Any] = []
    endless.append(endless)
    log.info("b", surrogate="\ud800", endless=endless, plain=[1])
    a, b = lines(path)[1:]
    assert (a["nan"], a["path"]) == (None, repr(Path("/x")))
    assert a["role_info"] == {
        "kind": "trainer",
        "name": "t",
        "incarnation": "i",
        "address": "",
    }
    assert (b["level"], b["event"], b["plain"]) == ("info", "b", [1])
    assert b["surrogate"] == r"'\ud800'"
    assert "[deeper than 16]" in str(b["endless"])


@pytest.mark.parametrize(
    "name",
    [
        "key",
        "api_key",
        "apiKey",
        "API-KEY",
        "token",
        "hf_token",
        "client_secret",
        "password",
        "Authorization",
        "aws.secret.access.key",
        "credentials",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert redact({name: "s3cret"}) == {name: REDACTED}
    assert redact({name: b"s3cret"}) == {name: REDACTED}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_tokens", 512),
        ("token", 7),
        ("tokens_per_s", "512"),
        ("monkey", "banana"),
        ("keyboard", "us"),
        ("token_file", "/run/token"),
        ("event", "key_rotated"),
    ],
)
def test_names_that_are_no_secrets(name: str, value: Any) -> None:
    assert redact({name: value}) == {name: value}


def test_secrets_are_found_at_any_depth_and_the_original_is_left_alone(
    log: BoundLog, path: Path
) -> None:
    class Login(msgspec.Struct):
        user: str
        password: str

    config = {"hub": [{"token": "s3cret", "url": "u"}], "login": Login("me", "s3cret")}
    log.bind(api_key="s3cret").info("configured", config=config)
    assert "s3cret" not in path.read_text()
    assert lines(path)[1]["config"]["hub"] == [{"token": REDACTED, "url": "u"}]
    assert config["hub"] == [{"token": "s3cret", "url": "u"}]


def test_the_standard_library_logs_into_the_same_file(log: BoundLog, path: Path) -> None:
    library = logging.getLogger("some.library")
    library.debug("too fine")
    library.warning("%s happened", "it")
    try:
        raise KeyError("gone")
    except KeyError:
        library.exception("failed")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)
        logging.captureWarnings(capture=True)
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    happened, failed, warned = lines(path)[1:]
    assert (happened["level"], happened["event"]) == ("warning", "it happened")
    assert happened["logger"] == "some.library"
    assert (failed["level"], failed["role"]) == ("error", "trainer")
    assert failed["exception"].endswith("KeyError: 'gone'")
    assert "old thing" in warned["event"]


def test_a_library_that_writes_to_the_terminal_is_brought_over(
    path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    library = logging.getLogger("loud.library")
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    try:
        configure_logging(path, role="trainer", run="run-1")
        library.warning("hear me")
    finally:
        library.handlers.clear()
    assert capfd.readouterr().err == ""
    assert [line["event"] for line in lines(path)][1:] == ["hear me"]


def test_a_second_call_moves_the_libraries_and_leaves_the_first_log_its_file(
    log: BoundLog, path: Path, tmp_path: Path
) -> None:
    other = tmp_path / "buffer-0.jsonl"
    configure_logging(other, role="buffer", run="run-1")
    logging.getLogger("some.library").warning("once")
    log.info("still here")
    assert [line["event"] for line in lines(path)] == ["log_opened", "still here"]
    assert [line["event"] for line in lines(other)] == ["log_opened", "once"]


def test_without_a_path_lines_go_to_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    log = configure_logging(None, role="launcher", run="run-1")
    log.info("started")
    assert json.loads(capfd.readouterr().err.splitlines()[1])["event"] == "started"


WRITER = """
import sys
from pathlib import Path
from ratchet.observability.logs import configure_logging

log = configure_logging(Path(sys.argv[1]), role=sys.argv[2], run="r")
for n in range(500):
    log.info("event", n=n, fill="x" * (n * 7 % 3000))
"""


def test_threads_and_processes_never_tear_a_line(log: BoundLog, path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), name]) for name in ("a", "b")
    ]
    threads = [
        threading.Thread(target=lambda: [log.info("event", n=n) for n in range(500)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [writer.wait() for writer in writers] == [0, 0]
    events = [line for line in lines(path) if line["event"] == "event"]
    by_role = [[line["n"] for line in events if line["role"] == role] for role in ("a", "b")]
    assert by_role == [list(range(500))] * 2
    assert len(events) == 2000
