import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.rundirs import write_ledgers
from typer.testing import CliRunner, Result

from ratchet import cli_inspect
from ratchet.errors import UserError

LINES = [
    {"level": "info", "event": "version_updated", "role": "registry", "version": 1},
    {"level": "warning", "event": "lease_ended", "role": "buffer", "group": 3},
    {"level": "error", "event": "actor_failed", "role": "rollout-1", "exception": "boom\nboom"},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "runs" / "sums"
    (root / "logs").mkdir(parents=True)
    for second, line in enumerate(LINES):
        path = root / "logs" / f"{line['role']}.jsonl"
        stamped = {"timestamp": f"2026-01-01T00:00:0{second}.000000Z", **line}
        path.write_text(json.dumps(stamped) + "\n")
    (root / "logs" / "rollout-1.err").write_text("Segmentation fault\n")
    write_ledgers(root)
    return root


def invoke(*arguments: Any) -> Result:
    result = CliRunner().invoke(cli_inspect.app, [str(argument) for argument in arguments])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def rows(*arguments: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in invoke(*arguments, "--json").stdout.splitlines()]


def test_logs_of_all_processes_by_time(run: Path) -> None:
    lines = invoke("logs", run).stdout.splitlines()
    assert [line.split()[1:4] for line in lines[:3]] == [
        ["INFO", "registry", "version_updated"],
        ["WARNING", "buffer", "lease_ended"],
        ["ERROR", "rollout-1", "actor_failed"],
    ]
    assert lines[3:5] == ["    boom", "    boom"]
    assert lines[5].split()[1:] == ["rollout-1", "Segmentation", "fault"]


@pytest.mark.parametrize(
    ("options", "events"),
    [
        ([], ["version_updated", "lease_ended", "actor_failed", None]),
        (["--role", "rollout"], ["actor_failed", None]),
        (["--level", "warning"], ["lease_ended", "actor_failed", None]),
        (["--event", "*_ended"], ["lease_ended"]),
        (["--where", "group=3", "--where", "role=buffer"], ["lease_ended"]),
        (["--where", "group=3", "--where", "role=trainer"], []),
    ],
)
def test_log_filters(run: Path, options: list[str], events: list[str | None]) -> None:
    assert [row.get("event") for row in rows("logs", run, *options)] == events


def test_a_line_that_is_not_json_is_json_all_the_same(run: Path) -> None:
    assert rows("logs", run)[3] | {"timestamp": ""} == {
        "timestamp": "",
        "role": "rollout-1",
        "raw": "Segmentation fault",
    }


def test_logs_are_those_of_the_newest_run_by_default(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parents[1])
    older = run.parent / "older"
    (older / "logs").mkdir(parents=True)
    (run.parent / "not a run").mkdir()
    os.utime(older / "logs", (0, 0))
    assert len(rows("logs")) == 4
    os.utime(run / "logs", (-1, -1))
    assert rows("logs") == []


def test_versions(run: Path) -> None:
    found = rows("versions", run)
    assert [row["state"] for row in found] == ["live", "live", "burnt", "reserved"]
    assert found[1] == {
        "version": 1,
        "term": 1,
        "step": 1,
        "parent": 0,
        "state": "live",
        "digest": f"{1:064x}",
        "reason": None,
        "created_at": 2.0,
        "decided_at": 3.0,
        "trainer": "trainer-0",
    }
    header, *lines = invoke("versions", run).stdout.splitlines()
    assert header.split()[:5] == ["version", "term", "step", "parent", "state"]
    assert [line.split()[:5] for line in lines] == [
        ["0", "1", "0", "-", "live"],
        ["1", "1", "1", "0", "live"],
        ["2", "1", "2", "1", "burnt"],
        ["3", "1", "2", "-", "reserved"],
    ]


def test_groups(run: Path) -> None:
    found = rows("groups", run)
    assert [row["group"] for row in found] == [0, 1, 2, 3, 4, 5]
    assert {name: found[1][name] for name in ("prompt", "epoch", "attempt", "state", "reason")} == {
        "prompt": "prompt-1",
        "epoch": 0,
        "attempt": 0,
        "state": "trained",
        "reason": None,
    }
    names = ("min_version", "max_version", "staleness", "trained_step", "reward_mean")
    assert [found[1][name] for name in names] == [0, 1, 1, 1, 0.25]
    assert [row["group"] for row in rows("groups", run, "--state", "dropped")] == [2, 3, 4]
    assert [row["group"] for row in rows("groups", run, "--version", 0)] == [0, 1]
    assert rows("groups", run, "--state", "issued", "--version", 0) == []


def test_the_table_of_groups_shows_the_last_ones_and_says_so(run: Path) -> None:
    header, *lines = invoke("groups", run).stdout.splitlines()
    assert header.split()[:3] == ["group", "prompt", "epoch"]
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3", "4", "5"]
    lines = invoke("groups", run, "--last", 2).stdout.splitlines()[1:]
    assert [line.split()[0] for line in lines[:2]] == ["4", "5"]
    assert lines[2] == "the last 2 of 6 groups; --last 0 shows all"
    assert len(invoke("groups", run, "--last", 0).stdout.splitlines()) == 7


def test_report(run: Path) -> None:
    (found,) = rows("report", run)
    assert found["dropped"] == {"failed": 1, "stale": 2}
    assert "stale 2" in invoke("report", run).stdout


@pytest.mark.parametrize("command", ["logs", "versions", "groups", "report"])
def test_a_directory_that_is_no_run_is_refused(command: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist; give the directory of a run"):
        invoke(command, tmp_path / "nowhere")
    with pytest.raises(UserError, match="is not a run directory: it has no logs/"):
        invoke(command, tmp_path)


@pytest.mark.parametrize("command", ["versions", "groups"])
def test_a_run_that_has_not_started_is_refused(command: str, tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(UserError, match=r"sqlite does not exist; give the directory of a run that"):
        invoke(command, tmp_path)


def test_no_run_at_all_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no run in runs/ here"):
        invoke("logs")


def test_an_unknown_state_is_refused(run: Path) -> None:
    with pytest.raises(UserError, match="--state 'lost' is not known; use one of issued, claimed"):
        invoke("groups", run, "--state", "lost")


def ratchet(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ratchet.cli", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_the_command_ends_with_2_and_one_line_for_a_wrong_directory(tmp_path: Path) -> None:
    out, err = (process := ratchet("versions", tmp_path / "nowhere")).communicate()
    assert (process.returncode, out) == (2, "")
    way_out = "give the directory of a run, such as runs/NAME"
    assert err == f"error: {tmp_path}/nowhere does not exist; {way_out}\n"


def test_following_shows_new_lines_until_interrupted(run: Path) -> None:
    with ratchet("logs", run, "-f", "--json", "--event", "*") as process:
        assert process.stdout is not None
        events = [json.loads(process.stdout.readline())["event"] for _ in range(3)]
        assert events == [line["event"] for line in LINES]
        with (run / "logs" / "trainer-0.jsonl").open("a") as file:
            file.write('{"timestamp": "2026-01-01T00:00:09.000000Z", "event": "late"}\n')
        assert json.loads(process.stdout.readline())["event"] == "late"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "")


def test_importing_the_commands_is_light() -> None:
    heavy = ("torch", "transformers", "numpy", "pydantic", "sqlite3", "msgspec", "structlog")
    code = f"import sys, ratchet.cli_inspect; print([m for m in {heavy!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_the_life_of_one_group(run: Path) -> None:
    (found,) = rows("groups", run, "--group", 2)
    assert (found["group"], found["state"], found["reason"]) == (2, "dropped", "stale")
    life = [(event["event"], event["detail"]) for event in found["life"]]
    assert life == [
        ("issued", None),
        ("claimed", "rollout-0"),
        ("finished", None),
        ("dropped", "stale"),
    ]
    lines = [line.split() for line in invoke("groups", run, "--group", 2).stdout.splitlines()]
    assert ["reason", "stale"] in lines
    assert ["max_version", "1"] in lines
    assert [line[2:] for line in lines if "claimed" in line] == [["claimed", "rollout-0"]]
    with pytest.raises(UserError, match=r"--group 6: .* has no such group"):
        invoke("groups", run, "--group", 6)
