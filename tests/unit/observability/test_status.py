"""What a status says: the chain of waits, the sentence about it, the tables."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ratchet.observability.status import duration, make_view, print_status
from ratchet.observability.waits import Chain, explain, longest_chain, waits_of
from ratchet.status import (
    DeadLetterRow,
    LinkRow,
    RoleReport,
    RoleStatus,
    RunStatus,
    WaitRow,
)
from ratchet.types import RoleInfo, VersionRecord


def wait(who: str, on: str, waited_s: float = 10.0, what: str = "X", left_s: float = 20) -> WaitRow:
    return WaitRow(who, on, what, waited_s, left_s)


def role(
    name: str,
    *waits: WaitRow,
    age_s: float = 0.0,
    report: dict[str, Any] | None = None,
    facts: dict[str, Any] | None = None,
    **fields: Any,
) -> RoleStatus:
    kind: Any = name.partition("-")[0]
    told = RoleReport(
        kind, name, "life", 7, "host", 60.0, 0.002, {name: 0}, facts or {}, waits, (), 0, ()
    )
    if report:
        told = msgspec.structs.replace(told, **report)
    status = RoleStatus(RoleInfo(kind, name, "life"), True, True, 0.0, 1)
    status = msgspec.structs.replace(status, report=told, report_age_s=age_s)
    return msgspec.structs.replace(status, **fields)


def run(*roles: RoleStatus, **fields: Any) -> RunStatus:
    status = RunStatus("sums", 100.0, 1, None, None, 0, roles)
    return msgspec.structs.replace(status, **fields)


def gone(name: str, reason: str) -> RoleStatus:
    return role(name, up=False, connected=False, reason=reason)


def silent(name: str, seconds: float, *waits: WaitRow, **fields: Any) -> RoleStatus:
    return role(name, *waits, silent_s=seconds, suspected=seconds >= 5, age_s=seconds, **fields)


FULL = {"batch_groups": 4, "queue_groups": 1, "in_flight_groups": 3, "request_step": 8}
OF_STEP_8 = "the batch of step 8"
OTHERS = (role("registry"), role("rollout-0"))


def edges(chain: Chain) -> list[str]:
    return [f"{row.who}>{row.on}" for row in chain.waits]


# --- the chain


@pytest.mark.parametrize(
    ("roles", "chain"),
    [
        ([], []),
        ([role("a", wait("a", "b")), role("b")], ["a>b"]),
        ([role("a", wait("a", "b")), role("b", wait("b", "c")), role("c")], ["a>b", "b>c"]),
        # the longest, not the oldest
        (
            [role("x", wait("x", "c", 99)), role("a", wait("a", "b")), role("b", wait("b", "c"))],
            ["a>b", "b>c"],
        ),
        # of equals the oldest
        ([role("a", wait("a", "b", 3)), role("x", wait("x", "b", 4))], ["x>b"]),
        # of equals the one that ends where something is wrong
        (
            [role("a", wait("a", "b", 9), wait("a", "c", 8)), role("b"), silent("c", 7)],
            ["a>c"],
        ),
        # over a kind to whoever of it waits
        (
            [role("a", wait("a", "rollout")), role("rollout-0", wait("rollout-0", "b"))],
            ["a>rollout", "rollout-0>b"],
        ),
        # one that has left waits no more
        ([role("a", wait("a", "b"), up=False, reason="killed")], []),
        # two waits of one on another count once, with the older one
        ([role("a", wait("a", "b", 5), wait("a", "b", 6, "Y"))], ["a>b"]),
    ],
)
def test_the_longest_chain(roles: list[RoleStatus], chain: list[str]) -> None:
    found = longest_chain(run(*roles))
    assert (edges(found), found.cycle) == (chain, False)


def test_a_cycle_is_the_chain_and_what_leads_into_it_is_not() -> None:
    roles = [
        role("a", wait("a", "b")),
        role("b", wait("b", "c")),
        role("c", wait("c", "d")),
        role("d", wait("d", "b")),
    ]
    found = longest_chain(run(*roles))
    assert found.cycle
    assert sorted(edges(found)) == ["b>c", "c>d", "d>b"]
    order = [row.who for row in found.waits]
    assert [row.on for row in found.waits] == [*order[1:], order[0]]


def test_a_wait_on_any_of_a_kind_is_no_deadlock() -> None:
    roles = [
        role("trainer-0", wait("trainer-0", "rollout")),
        role("rollout-0", wait("rollout-0", "trainer-0")),
        role("rollout-1"),
    ]
    assert not longest_chain(run(*roles)).cycle


def test_waits_that_need_not_have_been_together_make_no_chain_and_no_cycle() -> None:
    # b reported 3 s ago; since then its wait may have ended before that of a began
    young = [role("a", wait("a", "b", 1.0), age_s=0.5), role("b", wait("b", "a", 9.0), age_s=3.0)]
    assert edges(longest_chain(run(*young))) == ["b>a"]
    old = [role("a", wait("a", "b", 3.0), age_s=0.5), role("b", wait("b", "a", 9.0), age_s=3.0)]
    assert longest_chain(run(*old)).cycle


def test_what_a_silent_process_waits_for_holds_still() -> None:
    roles = [role("a", wait("a", "b", 2.0), age_s=0.5), silent("b", 9.0, wait("b", "c", 1.0))]
    assert edges(longest_chain(run(*roles))) == ["a>b", "b>c"]


def test_many_roles_that_all_wait_on_each_other_are_looked_at_in_no_time() -> None:
    names = [f"r{n}" for n in range(60)]
    roles = [role(a, *(wait(a, b) for b in names[n + 1 :])) for n, a in enumerate(names)]
    assert len(longest_chain(run(*roles)).waits) == 59


def test_waits_are_as_of_now_the_longest_first() -> None:
    roles = [role("a", wait("a", "b", 1.0, left_s=9.0), age_s=0.5), role("b", wait("b", "c", 3.0))]
    assert waits_of(run(*roles)) == (wait("b", "c", 3.0), wait("a", "b", 1.5, left_s=8.5))


# --- the sentence


def stalled(*rollouts: RoleStatus, **facts: Any) -> RunStatus:
    waits = wait("trainer-0", "buffer", 12.3, OF_STEP_8, 287.7)
    buffer = role("buffer", facts=FULL | facts)
    return run(role("registry"), buffer, role("trainer-0", waits), *rollouts)


HEAD = "trainer-0 waits 12.3 s on buffer for the batch of step 8; "
IDLE = "buffer responds and waits on nobody; it has 1 of 4 groups for it, and "
TAIL = "; trainer-0 gives up in 287.7 s"


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (
            stalled(role("rollout-0"), silent("rollout-1", 9.0)),
            HEAD + IDLE + "3 are in flight; rollout-1 has not responded for 9 s, though its"
            " process is there" + TAIL,
        ),
        (
            stalled(
                role("rollout-0"),
                silent("rollout-10", 9.0, connected=False),
                silent("rollout-1", 9.0),
            ),
            HEAD + IDLE + "3 are in flight; the process of rollout-10 cannot be reached, for 9 s;"
            " rollout-1 has not responded for 9 s, though its process is there" + TAIL,
        ),
        (
            stalled(gone("rollout-0", "the process of rollout-0 has ended"), in_flight_groups=0),
            HEAD + IDLE + "0 are in flight; no rollout is up; rollout-0 has left: the process of"
            " rollout-0 has ended" + TAIL,
        ),
        (
            stalled(role("rollout-0", facts={"version": None}), in_flight_groups=0),
            HEAD + IDLE + "0 are in flight; no rollout asks for prompts; rollout-0 holds no"
            " version" + TAIL,
        ),
        (
            stalled(
                role("rollout-0", facts={"version": 3}),
                in_flight_groups=0, credit_groups=4, withheld_groups=4,
            ),
            HEAD + IDLE + "0 are in flight; its room waits for the weights that are trained on what"
            " it had" + TAIL,
        ),
        (
            run(
                *OTHERS,
                silent("buffer", 4.0),
                role("trainer-0", wait("trainer-0", "buffer", 12.3, OF_STEP_8, 287.7)),
            ),
            HEAD + "buffer has not responded for 4 s, though its process is there" + TAIL,
        ),
        (
            run(
                *OTHERS,
                role("buffer"),
                role(
                    "trainer-0",
                    wait("trainer-0", "buffer", 12.3, OF_STEP_8, 287.7),
                    report={"links": (LinkRow("buffer", False, 0.0, 3, 0, "no route"),)},
                ),
            ),
            HEAD + "the link from trainer-0 to buffer is down: no route (3 messages wait); buffer"
            " responds and waits on nobody" + TAIL,
        ),
        (
            run(
                role("registry"),
                role("buffer"),
                role("trainer-0", wait("trainer-0", "rollout", 30.0, "the first engine", 270.0)),
            ),
            "trainer-0 waits 30.0 s on rollout for the first engine; no rollout is up; trainer-0"
            " gives up in 270.0 s",
        ),
        (
            run(
                role("registry"),
                role("buffer"),
                role("trainer-0", wait("trainer-0", "rollout", 30.0, "the first engine", 270.0)),
                role("rollout-0", up=False),
            ),
            "trainer-0 waits 30.0 s on rollout for the first engine; no rollout is up; rollout-0"
            " has started and not registered yet; trainer-0 gives up in 270.0 s",
        ),
        (
            run(
                *OTHERS[:1],
                role("buffer"),
                role("trainer-0", wait("trainer-0", "rollout-0", 8.0, "LoadWeights", 57.0)),
                role("rollout-0", facts={"version": 3, "loading": 4}),
            ),
            "trainer-0 waits 8.0 s on rollout-0 for LoadWeights; rollout-0 loads version 4;"
            " trainer-0 gives up in 57.0 s",
        ),
        (
            run(
                *OTHERS,
                role("buffer", wait("buffer", "trainer-0", 12.0, "Y", 18.0)),
                role("trainer-0", wait("trainer-0", "buffer", 12.3, "X", 17.7)),
            ),
            "deadlock: buffer waits 12.0 s on trainer-0 for Y; trainer-0 waits 12.3 s on buffer for"
            " X; trainer-0 gives up in 17.7 s",
        ),
        (
            run(*OTHERS, role("buffer"), role("trainer-0", wait("trainer-0", "nobody", 3.0))),
            "trainer-0 waits 3.0 s on nobody for X; nobody here is called nobody; trainer-0 gives"
            " up in 20.0 s",
        ),
        (
            run(
                *OTHERS,
                role("buffer", age_s=0.4),
                role("trainer-0", age_s=0.7, facts={"last_step_s": 0.5}),
            ),
            "4 roles respond, and none has waited for longer than 0.7 s; the last step of trainer-0"
            " was 1.2 s ago",
        ),
        (
            run(
                *OTHERS,
                role("buffer", report={"mailboxes": {"buffer": 500}}),
                role("trainer-0", report={"loop_lag_s": 2.5}),
                gone("rollout-9", "stopped"),
                gone("rollout-8", "killed"),
            ),
            "500 messages wait in buffer; the loop of trainer-0 was held up for 2.5 s; rollout-8"
            " has left: killed; 2 roles respond, and none has waited for longer than 0.0 s",
        ),
        (
            run(*OTHERS, end="failed", end_reason="no batch"),
            "the run has ended: failed (no batch)",
        ),
    ],
)  # fmt: skip
def test_the_sentence(status: RunStatus, sentence: str) -> None:
    assert explain(status) == sentence


def test_of_much_trouble_the_first_is_named_and_the_rest_counted() -> None:
    roles = (silent(f"rollout-{n}", 9.0) for n in range(10))
    text = explain(run(role("registry"), role("buffer"), role("trainer-0"), *roles))
    assert text.count("has not responded") == 3
    assert "and 7 more have trouble" in text


# --- the text and the JSON


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
