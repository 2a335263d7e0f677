"""A status as it is shown: the text of its tables, and the JSON."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from rich.console import Console
from tests.helpers.run_statuses import gone, role, run, silent, wait

from ratchet.observability.status import duration, make_view, print_status
from ratchet.observability.waits import explain
from ratchet.status import DeadLetterRow, LinkRow, RoleStatus, RunStatus
from ratchet.types import RoleInfo, VersionRecord


def shown(status: RunStatus) -> list[str]:
    out = io.StringIO()
    print_status(make_view("0123456789abcdef", status), Console(file=out))
    return [" ".join(line.split()) for line in out.getvalue().splitlines()]


LIVE = VersionRecord(7, 2, 6, 6, "live", "d")


def busy() -> RunStatus:
    links = (
        LinkRow("buffer", True, 0.0, 0, 1),
        LinkRow("rollout-0", True, 6.0, 12, 3),
        LinkRow("trainer-9", False, 0.0, 0, 0, "trainer-9 has stopped"),
    )
    letters = (DeadLetterRow("trainer-0", "rollout-9", "AbortLoad", "gone", 3),)
    return run(
        role("registry"),
        role("buffer", facts={"queue_groups": 3, "request_step": None, "credit_groups": 0}),
        role(
            "trainer-0",
            wait("trainer-0", "rollout-0", 8.0, "LoadWeights", 57.0),
            facts={
                "step": 8,
                "busy_share": 0.25,
                "last_step_s": 9.46,
                "publishing": True,
                "waits_for_batch": False,
            },
            report={"links": links, "dead_letters": letters, "num_dead_letters": 3},
            num_starts=2,
        ),
        silent("rollout-0", 6.0),
        gone("rollout-1", "killed"),
        term=2,
        live=LIVE,
        newest=8,
        num_burnt=1,
    )


def test_the_text() -> None:
    assert shown(busy()) == [
        "run sums (0123456789ab), up 1 min 40 s, term 2, live version 7 (step 6, 2 behind the"
        " trainer), newest 8, 1 burnt",
        "",
        "role kind process loop restarts mailbox lag dead",
        "registry registry up, 7@host ok 0 0 2 ms 0",
        "buffer buffer up, 7@host ok 0 0 2 ms 0",
        "trainer-0 trainer up, 7@host ok 1 0 2 ms 3",
        "rollout-0 rollout up, 7@host silent 6 s 0 0 2 ms 0",
        "rollout-1 rollout left - 0 - - -",
        "",
        "role says",
        "buffer queue 3, credit 0",
        "trainer-0 step 8, busy share 0.25, last step 9.5 s, publishing",
        "rollout-1 left: killed",
        "",
        "links",
        "from to state queued in flight",
        "trainer-0 rollout-0 silent 6 s 12 3",
        "",
        "dead letters told by to message why",
        "3 trainer-0 rollout-9 AbortLoad gone",
        "",
        "who waits on for since gives up in",
        "trainer-0 rollout-0 LoadWeights 8.0 s 57.0 s",
        "",
        "trainer-0 waits 8.0 s on rollout-0 for LoadWeights; rollout-0 has not responded for 6 s,"
        " though its process is there; rollout-1 has left: killed; trainer-0 gives up in 57.0 s",
    ]


def test_a_table_without_rows_is_left_out() -> None:
    lines = shown(run(role("registry"), role("buffer"), role("trainer-0")))
    assert not [line for line in lines if line.startswith(("links", "dead", "who"))]
    assert lines[0].endswith("term 1, no live version, 0 burnt")


def test_a_role_that_starts_is_lost_or_late_says_so() -> None:
    lines = shown(
        run(
            role("rollout-0", up=False),
            role("rollout-1", connected=False, silent_s=3.0),
            role("rollout-2", report={"loop_lag_s": 0.2}),
            RoleStatus(RoleInfo("rollout", "rollout-3", "x"), True, True, 0.0, 1),
        )
    )
    assert lines[3:7] == [
        "rollout-0 rollout up, 7@host starting 0 0 2 ms 0",
        "rollout-1 rollout lost quiet 3 s 0 0 2 ms 0",
        "rollout-2 rollout up, 7@host late 0 0 200 ms 0",
        "rollout-3 rollout up ok 0 - - -",
    ]
    assert "rollout-3 has not reported yet" in lines


def test_what_a_role_says_cannot_steer_the_terminal() -> None:
    evil = "a\x1b[2J[red]b"
    lines = shown(
        run(
            role("registry", facts={"x": evil}),
            gone("rollout-1", evil),
            role("trainer-0", wait("trainer-0", "buffer", 3.0, evil)),
            name=evil,
        )
    )
    assert all("\x1b" not in line for line in lines)
    assert sum("[red]b" in line for line in lines) == 5  # header, fact, reason, wait, verdict


def test_the_json_has_all_of_it() -> None:
    view = make_view("0123456789abcdef", busy())
    data = msgspec.json.decode(msgspec.json.encode(view))
    assert data["running"] is True
    assert data["run_id"] == "0123456789abcdef"
    assert data["verdict"] == explain(busy())
    assert data["chain"]["cycle"] is False
    assert [row["on"] for row in data["chain"]["waits"]] == ["rollout-0"]
    assert data["waits"][0]["what"] == "LoadWeights"
    assert _names(data["status"]["roles"]) == [
        "registry", "buffer", "trainer-0", "rollout-0", "rollout-1",
    ]  # fmt: skip
    assert data["status"]["live"]["version"] == 7


def _names(roles: Iterable[dict[str, Any]]) -> list[str]:
    return [role["role"]["name"] for role in roles]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.94, "59.9 s"), (60.0, "1 min 0 s"), (3599.0, "59 min 59 s"),
     (3600.0, "1 h 0 min"), (90_061.0, "25 h 1 min")],
)  # fmt: skip
def test_a_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
