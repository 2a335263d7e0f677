"""What a run says of itself, made up: roles, their waits and their reports."""

from __future__ import annotations

from typing import Any

import msgspec

from ratchet.status import RoleReport, RoleStatus, RunStatus, WaitRow
from ratchet.types import RoleInfo


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
