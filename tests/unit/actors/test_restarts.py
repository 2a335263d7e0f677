"""Verdicts: a table of strategies and ends, and what holds for every sequence of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.actors.restarts import (
    ChildRule,
    End,
    EndKind,
    Escalate,
    Finish,
    Judge,
    Restart,
    RestartKind,
    Rules,
    Strategy,
    Verdict,
)

NAMES = ("a", "b", "c")


def judge(
    *,
    restart: RestartKind = "transient",
    significant: tuple[str, ...] = (),
    names: tuple[str, ...] = NAMES,
    **rules: object,
) -> Judge:
    """Three children, all up since 0 s, that may be restarted often."""
    defaults: dict[str, object] = {"max_restarts": 5, "window_s": 60.0}
    made = Judge(
        [ChildRule(name, restart, name in significant) for name in names],
        Rules(**(defaults | rules)),  # type: ignore[arg-type]  # as the tests name them
    )
    for name in names:
        made.starts(name, 0.0)
    return made


@pytest.mark.parametrize(
    ("strategy", "who", "stop", "start"),
    [
        ("one_for_one", "a", (), ("a",)),
        ("one_for_one", "b", (), ("b",)),
        ("one_for_one", "c", (), ("c",)),
        ("one_for_all", "a", ("c", "b"), ("a", "b", "c")),
        ("one_for_all", "b", ("c", "a"), ("a", "b", "c")),
        ("one_for_all", "c", ("b", "a"), ("a", "b", "c")),
        ("rest_for_one", "a", ("c", "b"), ("a", "b", "c")),
        ("rest_for_one", "b", ("c",), ("b", "c")),
        ("rest_for_one", "c", (), ("c",)),
    ],
)
@pytest.mark.parametrize("kind", ["abnormal", "consequence"])
def test_who_is_stopped_and_who_is_started(
    strategy: Strategy, who: str, stop: tuple[str, ...], start: tuple[str, ...], kind: EndKind
) -> None:
    supervised = judge(strategy=strategy)
    assert supervised.ended(End(who, kind), 1.0) == Restart(stop, start, 1.0)
    assert supervised.up == tuple(n for n in NAMES if n not in start)


@pytest.mark.parametrize("strategy", ["one_for_one", "one_for_all", "rest_for_one"])
@pytest.mark.parametrize(
    ("restart", "kind", "again"),
    [
        ("permanent", "normal", True),
        ("permanent", "abnormal", True),
        ("permanent", "consequence", True),
        ("transient", "normal", False),
        ("transient", "abnormal", True),
        ("transient", "consequence", True),
        ("temporary", "normal", False),
        ("temporary", "abnormal", False),
        ("temporary", "consequence", False),
    ],
)
def test_which_ends_lead_to_a_restart(
    strategy: Strategy, restart: RestartKind, kind: EndKind, again: bool
) -> None:
    verdict = judge(strategy=strategy, restart=restart).ended(End("a", kind), 1.0)
    assert isinstance(verdict, Restart) == again
    assert again or verdict is None


@pytest.mark.parametrize("restart", ["permanent", "transient", "temporary"])
def test_what_no_restart_can_mend_ends_all_at_once(restart: RestartKind) -> None:
    end = End("b", "fatal", "model.path")
    assert judge(restart=restart).ended(end, 1.0) == Escalate(end, 1)


def test_a_temporary_sibling_is_stopped_and_not_started() -> None:
    rules = Rules("one_for_all", max_restarts=1)
    supervised = Judge([ChildRule("a"), ChildRule("b", "temporary")], rules)
    supervised.starts("a", 0.0)
    supervised.starts("b", 0.0)
    assert supervised.ended(End("a", "abnormal"), 1.0) == Restart(("b",), ("a",), 1.0)


def test_the_end_of_a_sibling_that_was_stopped_is_no_failure() -> None:
    supervised = judge(strategy="one_for_all", max_restarts=1)
    assert isinstance(supervised.ended(End("a", "abnormal"), 1.0), Restart)
    assert supervised.ended(End("b", "abnormal", "killed"), 1.1) is None
    assert supervised.ended(End("c", "abnormal", "lost a"), 1.2) is None


def test_a_start_that_fails_is_an_end_and_takes_back_what_was_started_with_it() -> None:
    supervised = judge(strategy="rest_for_one")
    assert supervised.ended(End("a", "abnormal"), 1.0) == Restart(("c", "b"), NAMES, 1.0)
    supervised.starts("a", 2.0)
    supervised.starts("b", 2.0)
    verdict = supervised.ended(End("b", "abnormal", "could not start"), 2.0)
    assert verdict == Restart((), ("b", "c"), 2.0)  # c was not up again yet


# --- intensity


def test_the_intensity_is_that_of_all_children_and_the_first_end_is_the_cause() -> None:
    supervised = judge(max_restarts=2)
    ends = [End(who, "abnormal", f"{who} broke") for who in NAMES]
    assert isinstance(supervised.ended(ends[0], 10.0), Restart)
    assert isinstance(supervised.ended(ends[1], 40.0), Restart)
    assert supervised.ended(ends[2], 70.0) == Escalate(ends[0], 3)  # the edge belongs to the window


def test_what_lies_before_the_window_is_forgotten() -> None:
    supervised = judge(max_restarts=1)
    for now in (0.0, 61.0, 122.0):
        assert isinstance(supervised.ended(End("a", "abnormal"), now), Restart)
        supervised.starts("a", now)
    assert supervised.ended(End("b", "abnormal"), 182.0) == Escalate(End("a", "abnormal"), 2)


def test_without_restarts_the_first_end_is_the_last() -> None:
    end = End("b", "abnormal", "why")
    supervised = judge(max_restarts=0)
    assert supervised.ended(end, 5.0) == Escalate(end, 1)
    assert supervised.up == ()
    assert supervised.ended(End("a", "abnormal"), 5.0) is None
    with pytest.raises(ValueError, match="a is started although all is over"):
        supervised.starts("a", 6.0)


# --- backoff


def test_the_pause_doubles_up_to_its_most_and_begins_anew_after_a_long_life() -> None:
    supervised = judge(max_restarts=100, backoff_first_s=1.0, backoff_most_s=5.0)
    now, pauses = 0.0, []
    for lived_s in (1.0, 59.9, 0.0, 0.0, 0.0, 60.0, 1.0):
        now += lived_s
        verdict = supervised.ended(End("b", "abnormal"), now)
        assert isinstance(verdict, Restart)
        pauses.append(round(verdict.at - now, 9))
        now = verdict.at
        supervised.starts("b", now)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0, 1.0, 2.0]


def test_a_sibling_does_not_shorten_a_pause() -> None:
    supervised = judge(strategy="rest_for_one", backoff_first_s=8.0, backoff_most_s=8.0)
    assert supervised.ended(End("c", "abnormal"), 1.0) == Restart((), ("c",), 9.0)
    assert supervised.ended(End("b", "abnormal"), 0.5) == Restart((), ("b", "c"), 9.0)


def test_a_thousand_failures_do_not_overflow() -> None:
    supervised = judge(max_restarts=2000, backoff_first_s=0.1, backoff_most_s=10.0)
    for i in range(1500):
        verdict = supervised.ended(End("a", "abnormal"), float(i))
        assert isinstance(verdict, Restart)
        supervised.starts("a", float(i))
    assert verdict.at == 1509.0


# --- the end in order


def test_any_significant_child_ends_it_in_order() -> None:
    supervised = judge(until="any", significant=("b",))
    assert supervised.ended(End("a", "normal"), 1.0) is None
    assert supervised.ended(End("b", "normal", "done"), 2.0) == Finish(End("b", "normal", "done"))
    assert supervised.ended(End("c", "abnormal"), 3.0) is None


def test_all_significant_children_end_it_in_order_and_one_that_came_back_counts_anew() -> None:
    supervised = judge(until="all", significant=NAMES, strategy="one_for_all")
    assert supervised.ended(End("a", "normal"), 1.0) is None
    assert supervised.ended(End("b", "abnormal"), 2.0) == Restart(("c",), NAMES, 2.0)
    for name in NAMES:
        supervised.starts(name, 2.0)
    assert supervised.ended(End("b", "normal"), 3.0) is None
    assert supervised.ended(End("c", "normal"), 3.0) is None
    assert supervised.ended(End("a", "normal", "last"), 4.0) == Finish(End("a", "normal", "last"))


def test_mistakes_of_whoever_builds_it_are_refused() -> None:
    with pytest.raises(ValueError, match="one name"):
        Judge([ChildRule("a"), ChildRule("a")], Rules())
    with pytest.raises(ValueError, match="significant"):
        Judge([ChildRule("a")], Rules(until="all"))


# --- whatever happens

KINDS: tuple[EndKind, ...] = ("normal", "abnormal", "consequence", "fatal")


@st.composite
def histories(draw: st.DrawFn) -> tuple[Judge, Rules, list[tuple[float, End, Verdict]]]:
    """A judge, and what it said to a random sequence of ends; who is due is started at once, as
    soon as its pause is over, or not yet.
    """
    names = tuple("abcdef"[: draw(st.integers(1, 6))])
    until = draw(st.sampled_from(["never", "any", "all"]))
    children = [
        ChildRule(
            name,
            draw(st.sampled_from(["permanent", "transient", "temporary"])),
            significant=i == 0 or draw(st.booleans()),
        )
        for i, name in enumerate(names)
    ]
    rules = Rules(
        draw(st.sampled_from(["one_for_one", "one_for_all", "rest_for_one"])),
        max_restarts=draw(st.integers(0, 4)),
        window_s=draw(st.sampled_from([1.0, 10.0])),
        backoff_first_s=draw(st.sampled_from([0.0, 0.5])),
        backoff_most_s=4.0,
        until=until,
    )
    made = Judge(children, rules)
    for name in names:
        made.starts(name, 0.0)
    now, due = 0.0, dict[str, float]()
    history: list[tuple[float, End, Verdict]] = []
    for i in range(draw(st.integers(0, 25))):
        now += draw(st.sampled_from([0.0, 0.25, 1.0, 5.0]))
        over = any(isinstance(verdict, Escalate | Finish) for _, _, verdict in history)
        if not over and draw(st.booleans()):
            for name in [n for n in names if due.get(n, now + 1) <= now]:
                made.starts(name, now)
                del due[name]
        kind = draw(st.sampled_from(KINDS[:3] * 5 + KINDS))
        end = End(draw(st.sampled_from(names)), kind, f"cause {i}")
        was_up = made.up
        verdict = made.ended(end, now)
        if isinstance(verdict, Restart):
            assert end.who in was_up
            assert set(verdict.stop) == (set(was_up) - {end.who}) & group(rules, names, end.who)
            due.update(dict.fromkeys(verdict.start, verdict.at))
        history.append((now, end, verdict))
    return made, rules, history


def group(rules: Rules, names: tuple[str, ...], who: str) -> set[str]:
    match rules.strategy:
        case "one_for_one":
            return {who}
        case "one_for_all":
            return set(names)
        case "rest_for_one":
            return set(names[names.index(who) :])


@given(histories())
def test_never_more_restarts_within_a_window_than_allowed(
    drawn: tuple[Judge, Rules, list[tuple[float, End, Verdict]]],
) -> None:
    _, rules, history = drawn
    times = [now for now, _, verdict in history if isinstance(verdict, Restart)]
    for first, last in zip(times, times[rules.max_restarts :], strict=False):
        assert last - first > rules.window_s


@given(histories())
def test_stops_are_in_reverse_order_and_starts_in_order(
    drawn: tuple[Judge, Rules, list[tuple[float, End, Verdict]]],
) -> None:
    for now, _, verdict in drawn[2]:
        if isinstance(verdict, Restart):
            assert list(verdict.stop) == sorted(verdict.stop, reverse=True)
            assert list(verdict.start) == sorted(verdict.start)
            assert verdict.at >= now


@given(histories())
def test_nothing_comes_after_the_end_and_an_escalation_names_the_first_cause(
    drawn: tuple[Judge, Rules, list[tuple[float, End, Verdict]]],
) -> None:
    made, rules, history = drawn
    over = [i for i, h in enumerate(history) if isinstance(h[2], Escalate | Finish)]
    if not over:
        return
    (last,) = over  # one end, and None from then on
    assert all(verdict is None for _, _, verdict in history[last + 1 :])
    now, end, verdict = history[last]
    if isinstance(verdict, Finish):
        assert verdict.last is end
        return
    assert isinstance(verdict, Escalate)
    assert made.up == ()
    if end.kind == "fatal":
        assert verdict.first is end
        return
    counted = [
        e for at, e, v in history[: last + 1] if v is not None and now - at <= rules.window_s
    ]
    assert verdict == Escalate(counted[0], rules.max_restarts + 1)
