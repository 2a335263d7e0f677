"""Who is up, who is silent, who has left: a table of facts over a clock of the test's own."""

from __future__ import annotations

from typing import Any

import msgspec

from ratchet.actors.membership import Membership, Suspicion
from ratchet.status import LinkRow, RoleReport, RoleStatus
from ratchet.types import RoleInfo

ME = RoleInfo("registry", "registry", "r1")
BUFFER = RoleInfo("buffer", "buffer", "b1")
ROLLOUT = RoleInfo("rollout", "rollout-0", "w1")
REBORN = RoleInfo("rollout", "rollout-0", "w2")


def link(peer: str, **fields: Any) -> LinkRow:
    row = LinkRow(peer, connected=True, silent_s=0.0, num_queued=0, num_in_flight=0)
    return msgspec.structs.replace(row, **fields)


def report(role: RoleInfo, **fields: Any) -> RoleReport:
    told = RoleReport(
        role.kind, role.name, role.incarnation, 1, "host", 1.0, 0.0, {}, {}, (), (), 0, ()
    )
    return msgspec.structs.replace(told, **fields)


def members(*roles: RoleInfo) -> Membership:
    found = Membership(ME, 5.0)
    for role in roles:
        found.join(role)
    return found


def row(members: Membership, name: str, now: float = 0.0, *links: LinkRow) -> RoleStatus:
    (found,) = [r for r in members.statuses(now, links) if r.role.name == name]
    return found


def test_the_registry_comes_first_then_the_living_as_they_joined_then_those_that_left() -> None:
    found = members(ROLLOUT, BUFFER)
    found.leave(ROLLOUT, "killed")
    last = RoleInfo("trainer", "trainer-0", "t1")
    found.join(last)
    rows = found.statuses(0.0, ())
    assert [(r.role, r.up, r.reason) for r in rows] == [
        (ME, True, None),
        (BUFFER, True, None),
        (last, True, None),
        (ROLLOUT, False, "killed"),
    ]
    assert list(found) == [BUFFER, last]  # the registry tells itself nothing
    assert len(found) == 2


def test_a_process_and_its_loop_are_two_facts() -> None:
    found = members(ROLLOUT)
    silent = row(found, "rollout-0", 0.0, link("rollout-0", silent_s=6.0))
    assert (silent.connected, silent.silent_s, silent.suspected) == (True, 6.0, True)
    well = row(found, "rollout-0", 0.0, link("rollout-0", silent_s=4.0))
    assert (well.connected, well.suspected) == (True, False)
    here = row(found, "rollout-0")  # in the registry's own process there is no link
    assert (here.connected, here.silent_s, here.suspected) == (True, 0.0, False)


def test_silence_is_told_once_and_its_end_once() -> None:
    found = members(ROLLOUT, BUFFER)
    rows = [0.0, 4.0, 5.0, 6.0, 7.0, 0.0, 1.0]
    news = [found.listen((link("rollout-0", silent_s=s), link("buffer")), 0.0) for s in rows]
    assert news == [
        [],
        [],
        [Suspicion(ROLLOUT, silent=True, connected=True, silent_s=5.0)],
        [],
        [],
        [Suspicion(ROLLOUT, silent=False, connected=True, silent_s=7.0)],
        [],
    ]


def test_a_cut_link_is_silent_since_it_was_seen_to_be_cut() -> None:
    found = members(ROLLOUT)
    down, up = link("rollout-0", connected=False), link("rollout-0")
    assert found.listen((up,), 99.0) == []
    assert found.listen((down,), 100.0) == []
    assert found.listen((down,), 104.0) == []
    assert found.listen((down,), 105.0) == [
        Suspicion(ROLLOUT, silent=True, connected=False, silent_s=5.0)
    ]
    status = row(found, "rollout-0", 107.0, down)
    assert (status.connected, status.silent_s, status.suspected) == (False, 7.0, True)
    assert found.listen((up,), 108.0) == [
        Suspicion(ROLLOUT, silent=False, connected=True, silent_s=5.0)
    ]
    assert found.listen((down,), 200.0) == []  # a new cut begins anew


def test_a_role_that_leaves_is_suspected_no_more_and_its_next_life_begins_well() -> None:
    found = members(ROLLOUT)
    silent = link("rollout-0", silent_s=9.0)
    assert found.listen((silent,), 0.0)
    found.leave(ROLLOUT, "silent")
    assert found.listen((silent,), 1.0) == []
    found.join(REBORN)
    assert found.listen((link("rollout-0"),), 2.0) == []
    assert found.listen((silent,), 3.0) == [Suspicion(REBORN, True, True, 9.0)]
    found.leave(REBORN, "silent")
    found.join(REBORN)  # the same life, given up and back
    assert found.listen((silent,), 4.0) == [Suspicion(REBORN, True, True, 9.0)]


def test_starts_are_counted_by_name() -> None:
    found = members(ROLLOUT)
    assert row(found, "rollout-0").num_starts == 1
    found.leave(ROLLOUT, "killed")
    found.join(REBORN)
    assert row(found, "rollout-0").num_starts == 2
    assert row(found, "registry").num_starts == 1


def test_a_report_counts_for_the_life_that_sent_it() -> None:
    found = members(ROLLOUT)
    found.report(report(REBORN, pid=2), 1.0)
    assert row(found, "rollout-0").report is None
    found.report(report(ROLLOUT, pid=3), 2.0)
    found.report(report(ROLLOUT, pid=4), 3.0)
    status = row(found, "rollout-0", 3.5)
    assert status.report is not None
    assert (status.report.pid, status.report_age_s) == (4, 0.5)
    found.report(report(ME, incarnation="of the process"), 3.0)
    assert row(found, "registry", 3.0).report_age_s == 0.0


def test_one_that_reports_and_has_not_registered_starts() -> None:
    found = members(BUFFER)
    found.report(report(ROLLOUT), 1.0)
    status = row(found, "rollout-0", 1.0, link("rollout-0"))
    assert (status.up, status.reason, status.connected) == (False, None, True)
    assert status.role.kind == "rollout"
    assert list(found) == [BUFFER]
    gone = link("rollout-0", connected=False)
    assert [r.role.name for r in found.statuses(2.0, (gone,))] == ["registry", "buffer"]
    found.join(ROLLOUT)
    status = row(found, "rollout-0", 2.0, link("rollout-0"))
    assert (status.up, status.num_starts) == (True, 1)
    assert status.report is not None  # what it said before it registered


def test_a_new_life_that_starts_is_shown_in_place_of_the_one_that_left() -> None:
    found = members(ROLLOUT)
    found.report(report(ROLLOUT, pid=3), 1.0)
    found.leave(ROLLOUT, "killed")
    found.report(report(ROLLOUT, pid=4), 2.0)  # its last words
    left = row(found, "rollout-0", 2.0)
    assert (left.reason, left.report.pid if left.report else None) == ("killed", 3)
    found.report(report(REBORN), 3.0)
    again = row(found, "rollout-0", 3.0, link("rollout-0"))
    assert (again.role.incarnation, again.reason, again.num_starts) == ("w2", None, 2)


def test_of_those_that_left_the_last_ones_are_kept() -> None:
    found = members()
    for n in range(1000):
        role = RoleInfo("rollout", f"rollout-{n}", "x")
        found.join(role)
        found.report(report(role), 0.0)
        found.leave(role, "killed")
    rows = found.statuses(0.0, ())
    assert [r.role.name for r in rows[1:]] == [f"rollout-{n}" for n in range(936, 1000)]
    for n in range(1000):
        found.report(report(RoleInfo("rollout", f"new-{n}", "x")), 0.0)
    assert len(found.statuses(0.0, ())) == 1 + 256 + 64


def test_engines_hear_of_all_but_each_other() -> None:
    other = RoleInfo("producer", "producer-0", "p1")
    found = members(BUFFER, ROLLOUT, other)
    assert found.who_hears_of(ROLLOUT) == found.who_hears_of(other) == (BUFFER,)
    assert found.who_hears_of(BUFFER) == (BUFFER, ROLLOUT, other)
    found.leave(BUFFER, "killed")
    assert found.who_hears_of(ROLLOUT) == ()
    assert found.who_hears_of(BUFFER) == (ROLLOUT, other)
