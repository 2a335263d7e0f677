from typing import Any

import pytest

from ratchet.errors import UserError
from ratchet.observability.lines import LineFilter, LogLine, printable, show

STAMP = "2026-01-01T12:34:56.789012Z"


def line(**fields: Any) -> LogLine:
    whole = {"timestamp": STAMP, "level": "info", "event": "group_finished", "role": "rollout-1"}
    return LogLine("rollout-1", STAMP, whole | fields, "{}")


RAW = LogLine("rollout-1", STAMP, None, "Traceback")


@pytest.mark.parametrize(
    ("typed", "matches", "matches_raw"),
    [
        ({}, True, True),
        ({"role": "rollout-1"}, True, True),
        ({"role": "rollout"}, True, True),
        ({"role": "roll"}, False, False),
        ({"role": "rollout-11"}, False, False),
        ({"level": "debug"}, True, True),
        ({"level": "info"}, True, True),
        ({"level": "warning"}, False, True),
        ({"event": "group_finished"}, True, False),
        ({"event": "group_*"}, True, False),
        ({"event": "Group_*"}, False, False),
        ({"event": "finished"}, False, False),
        ({"where": ["group=3"]}, True, False),
        ({"where": ["group=30"]}, False, False),
        ({"where": ["ok=true"]}, True, False),
        ({"where": ["name=a=b"]}, True, False),
        ({"where": ["stats.tokens=5"]}, True, False),
        ({"where": ["stats.tokens.x=5"]}, False, False),
        ({"where": ["flat.name=1"]}, True, False),
        ({"where": ["group=3", "ok=false"]}, False, False),
        (
            {"role": "rollout", "level": "info", "event": "group*", "where": ["ok=true"]},
            True,
            False,
        ),
    ],
)
def test_filters(typed: dict[str, Any], matches: bool, matches_raw: bool) -> None:
    wanted = LineFilter.parse(**typed)
    given = line(group=3, ok=True, name="a=b", stats={"tokens": 5}, **{"flat.name": 1})
    assert wanted.matches(given) is matches
    assert wanted.matches(RAW) is matches_raw


def test_a_role_without_a_rank_is_found_by_the_name_of_its_file_too() -> None:
    trainer = LogLine("trainer-0", STAMP, {"role": "trainer", "event": "e"}, "{}")
    for role in ("trainer", "trainer-0"):
        assert LineFilter(role=role).matches(trainer)


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ({"level": "loud"}, "--level 'loud' is not known; use one of debug, info"),
        ({"where": ["group"]}, "--where 'group' is not of the form field=value"),
        ({"where": ["=3"]}, "--where '=3' is not of the form"),
    ],
)
def test_what_cannot_be_a_filter_is_refused(typed: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        LineFilter.parse(**typed)


def test_showing_a_line() -> None:
    text = show(line(group=3, worker="rollout-1", nothing=None, stats={"tokens": 5}, pid=7))
    assert text == (
        "12:34:56.789 INFO     rollout-1    group_finished"
        ' group=3 worker=rollout-1 stats={"tokens":5}'
    )
    assert show(RAW) == "12:34:56.789          rollout-1    Traceback"


def test_an_exception_is_shown_below_its_line() -> None:
    text = show(line(exception="Traceback:\n  File x\nValueError: boom"))
    assert text.splitlines()[1:] == ["    Traceback:", "      File x", "    ValueError: boom"]


def test_nothing_in_a_log_steers_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\r\u202e"
    assert printable(evil) == r"\x1b]0;owned\x07\x1b[2J\r\u202e"
    for text in (
        show(line(text=evil)),
        show(line(event=evil)),
        show(line(exception=evil)),
        show(RAW._replace(raw=evil)),
    ):
        assert text.replace("\n", "").isprintable()
    assert printable("plain ü 東") == "plain ü 東"
