"""`ratchet status` against a registry on a real socket, and against what is left of a run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.certificates import Authority, Files
from tests.helpers.running_registry import RunningRegistry, secret
from typer.testing import CliRunner, Result

from ratchet import cli_status
from ratchet.errors import UserError


@pytest.fixture
def token(tmp_path: Path) -> Path:
    return secret(tmp_path / "token")


@pytest.fixture
def registry(tmp_path: Path, token: Path) -> Iterator[RunningRegistry]:
    sockets = tmp_path / "s"
    sockets.mkdir(mode=0o700)
    running = RunningRegistry(f"unix:{sockets}/registry.sock", token)
    yield running
    running.stop()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "runs" / "sums"
    (root / "logs").mkdir(parents=True)
    return root


def link(
    run: Path, address: str, token: Path | None, *, run_id: str = "run-7", tls: Any = None
) -> None:
    (run / "links.json").write_text(
        json.dumps(
            {
                "registry": address,
                "run_id": run_id,
                "token_file": None if token is None else str(token),
                "tls": tls,
            }
        )
    )


def invoke(*arguments: Any) -> Result:
    result = CliRunner().invoke(cli_status.app, [str(argument) for argument in arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def lines(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.output.splitlines()]


# --- a run that responds


def test_a_directory_leads_to_its_registry(run: Path, registry: Any, token: Path) -> None:
    link(run, registry.address, token)
    result = invoke(run)
    assert result.exit_code == 0
    shown = lines(result)
    assert shown[0].startswith("run sums (run-7), up")
    assert shown[3].startswith("registry registry up")
    assert shown[-1].startswith("no buffer is up; no trainer is up; no rollout is up; 1 roles")


def test_the_newest_run_is_the_default(
    run: Path, registry: Any, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link(run, registry.address, token)
    monkeypatch.chdir(run.parents[1])
    older = run.parent / "older"
    (older / "logs").mkdir(parents=True)
    os.utime(older / "logs", (0, 0))
    assert json.loads(invoke("--json").output)["run_id"] == "run-7"


def test_json_is_one_object(run: Path, registry: Any, token: Path) -> None:
    link(run, registry.address, token)
    (line,) = invoke(run, "--json").output.splitlines()
    data = json.loads(line)
    assert (data["running"], data["run_id"], data["status"]["name"]) == (True, "run-7", "sums")
    assert data["status"]["roles"][0]["role"]["name"] == "registry"
    assert "no trainer is up" in data["verdict"]


def test_an_address_and_a_token_will_do(tmp_path: Path, token: Path) -> None:
    running = RunningRegistry("tcp:127.0.0.1:0", token)
    try:
        address = running.address.removeprefix("tcp:")
        result = invoke("--registry", address, "--token-file", token)
        assert result.exit_code == 0
        assert lines(result)[0].startswith("run sums (run-7)")
    finally:
        running.stop()


def test_certificates_will_do_from_the_command_line_and_from_the_directory(
    tmp_path: Path, run: Path
) -> None:
    authority, strangers = Authority(tmp_path), Authority(tmp_path)
    running = RunningRegistry("tcp:127.0.0.1:0", authority.credentials())

    def options(files: Files) -> list[str]:
        return ["--tls-ca", files.ca, "--tls-cert", files.cert, "--tls-key", files.key]

    try:
        address = running.address.removeprefix("tcp:")
        mine = authority.sign()
        assert invoke("--registry", address, *options(mine)).exit_code == 0
        link(run, running.address, None, tls=vars(mine))
        assert invoke(run).exit_code == 0
        refused = invoke("--registry", address, *options(strangers.sign()))
        assert refused.exit_code == 2
        assert "refuses us" in refused.output
        assert "certificate" in refused.output
    finally:
        running.stop()


def test_a_visit_leaves_no_trace_at_the_registry(run: Path, registry: Any, token: Path) -> None:
    link(run, registry.address, token)
    for _ in range(3):
        data = json.loads(invoke(run, "--json").output)
    report = data["status"]["roles"][0]["report"]
    assert report["num_dead_letters"] == 0
    assert not [peer for peer in report["links"] if peer["peer"].startswith("visitor-")]
    levels = {level for level, _, _ in registry.log.events}
    assert not levels & {"warning", "error"}, registry.log.events


def test_nothing_is_written(run: Path, registry: Any, token: Path) -> None:
    link(run, registry.address, token)
    before = sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*"))
    invoke(run)
    assert sorted((p, p.stat().st_mtime_ns) for p in run.rglob("*")) == before


def test_watching_goes_on_until_the_run_does_not(
    run: Path, registry: Any, token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link(run, registry.address, token)
    shown: list[str] = []

    def show(view: Any, as_json: bool, *, clear: bool) -> None:
        shown.append(view.run_id)
        assert (as_json, clear) == (False, True)
        if len(shown) == 3:
            registry.stop()

    monkeypatch.setattr(cli_status, "_print", show)
    result = invoke(run, "--watch", "0.1")
    assert len(shown) >= 3
    assert result.exit_code == 1
    assert "no run responds" in result.output


# --- a run that does not


def test_a_run_whose_socket_is_gone_is_told_from_its_files(run: Path, token: Path) -> None:
    link(run, f"unix:{run}/gone.sock", token)
    line = {
        "timestamp": "2026-01-01T00:00:00Z", "level": "error", "role": "buffer", "event": "boom",
    }  # fmt: skip
    (run / "logs" / "buffer-0.jsonl").write_text(json.dumps(line) + "\n")
    result = invoke(run)
    assert result.exit_code == 1
    assert f"the socket of its registry, {run}/gone.sock, is gone" in result.output
    assert "boom" in result.output
    data = json.loads(invoke(run, "--json").output)
    assert (data["running"], "boom" in data["first_error"]) == (False, True)


def test_a_socket_that_nobody_listens_at_any_more(run: Path, tmp_path: Path, token: Path) -> None:
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    link(run, f"unix:{path}", token)
    result = invoke(run)
    assert result.exit_code == 1
    assert f"nobody listens at unix:{path}" in result.output
    assert "refused" in result.output


def test_a_run_that_never_began_or_ran_in_one_process(run: Path) -> None:
    result = invoke(run)
    assert result.exit_code == 1
    assert "it has no links.json" in result.output


def test_a_token_that_went_with_its_run(run: Path, tmp_path: Path) -> None:
    link(run, "tcp:127.0.0.1:9", tmp_path / "gone")
    result = invoke(run)
    assert result.exit_code == 1
    assert f"its token file, {tmp_path}/gone, is not here" in result.output


def test_a_registry_that_cannot_be_reached_is_named(token: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = ("--registry", f"127.0.0.1:{port}", "--token-file", token)
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert f"nobody listens at tcp:127.0.0.1:{port}" in result.output
    data = json.loads(invoke(*arguments, "--json").output)
    assert data["running"] is False


def test_a_registry_that_is_there_and_does_not_answer_is_told_apart(
    token: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_status, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:  # the kernel accepts, nobody else
        port = server.getsockname()[1]
        result = invoke("--registry", f"127.0.0.1:{port}", "--token-file", token)
    assert result.exit_code == 1
    assert (
        "did not answer within 0.3 s: its process is there, and its loop does not" in result.output
    )


# --- mistakes


def test_a_wrong_token_is_refused_and_says_so(
    run: Path, registry: Any, tmp_path: Path, token: Path
) -> None:
    link(run, registry.address, token)
    result = invoke(run, "--token-file", secret(tmp_path / "other", "cd" * 32))
    assert result.exit_code == 2
    assert "refuses us" in result.output
    assert "key" in result.output


def test_a_directory_of_another_run_is_refused(run: Path, registry: Any, token: Path) -> None:
    link(run, registry.address, token, run_id="run-8")
    result = invoke(run)
    assert result.exit_code == 2
    assert "run-8" in result.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--registry", "127.0.0.1:1"], "give --token-file, or --tls-ca"),
        (["--registry", "127.0.0.1"], "not of the form tcp:HOST:PORT"),
        (["--registry", "0.0.0.0:1", "--token-file", "t"], "every interface"),
        (["here", "--registry", "127.0.0.1:1"], "not both"),
        (["--registry", "127.0.0.1:1", "--tls-ca", "ca.pem"], "give all three, or none"),
        (["--registry", "127.0.0.1:1", "--token-file", "/nowhere"], "/nowhere"),
        (["/nowhere"], "/nowhere does not exist"),
        (["/"], "is not a run directory"),
        ([], "there is no run in runs/"),
    ],
)
def test_a_mistake_of_the_user_names_the_way_out(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        invoke(*arguments)
    assert text in str(error.value)


def test_a_damaged_note_is_named(run: Path) -> None:
    (run / "links.json").write_text("{")
    with pytest.raises(UserError, match=r"links\.json cannot be read"):
        invoke(run)
