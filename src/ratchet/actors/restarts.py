"""What a supervisor does when one of its children ends: pure, the clock is the caller's.

Consumes the starts and ends of children, with the time of each; produces verdicts. Waits for
nothing. The rules are those of Erlang/OTP's supervisor behaviour
(https://www.erlang.org/doc/apps/stdlib/supervisor.html): restart kinds, strategies, intensity, and
significant children, whose end in order is the supervisor's own. Three things are added. Restarts
back off. An end may be one that no restart can mend. And an escalation names the first of the ends
that led to it, not the last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

RestartKind: TypeAlias = Literal["permanent", "transient", "temporary"]
"""Started again: always | after an abnormal end | never."""

Strategy: TypeAlias = Literal["one_for_one", "one_for_all", "rest_for_one"]
"""Who starts again with a child: nobody | all | those that were started after it."""

EndKind: TypeAlias = Literal["normal", "abnormal", "consequence", "fatal"]
"""How a child ended: in order | it failed | it failed because another party had, as it says itself
| it failed in a way that no restart can mend."""

_MAX_DOUBLINGS: Final = 64


@dataclass(frozen=True)
class End:
    """The end of one life of a child."""

    who: str
    kind: EndKind
    reason: str = ""


@dataclass(frozen=True)
class ChildRule:
    """What is known of a child."""

    name: str
    restart: RestartKind = "transient"
    significant: bool = False
    """its end in order counts towards the supervisor's own, see `Rules.until`"""


@dataclass(frozen=True)
class Rules:
    """How a supervisor judges."""

    strategy: Strategy = "one_for_one"
    max_restarts: int = 0
    """restarts of all children together within any `window_s` seconds; one more escalates"""
    window_s: float = 60.0
    backoff_first_s: float = 0.0
    """pause before a child's first restart; doubles until the child has lived for `window_s`"""
    backoff_most_s: float = 0.0
    until: Literal["never", "any", "all"] = "never"
    """the supervisor ends in order with: nothing | any significant child | the last of them
    (`auto_shutdown` in OTP)"""


@dataclass(frozen=True)
class Restart:
    """Stop some, then start some."""

    stop: tuple[str, ...]
    """in reverse order of their start"""
    start: tuple[str, ...]
    """in order"""
    at: float
    """not before"""


@dataclass(frozen=True)
class Escalate:
    """Stop all children and end, abnormally."""

    first: End
    """the cause: the first of the ends that count"""
    num_ends: int


@dataclass(frozen=True)
class Finish:
    """Stop all children and end, in order."""

    last: End


Verdict: TypeAlias = Restart | Escalate | Finish | None


def own_end(name: str, verdict: Escalate | Finish | None, rules: Rules) -> End:
    """Return the end of a supervisor: "normal" if told to stop (None) or all is done, else with the
    first cause.
    """
    if verdict is None:
        return End(name, "normal", "stopped")
    if isinstance(verdict, Finish):
        return replace(verdict.last, who=name, kind="normal")
    reason = verdict.first.reason
    if verdict.num_ends > 1:
        reason += (
            f" (the first of {verdict.num_ends} ends of {name} within {rules.window_s:g} s, of"
            f" which max_restarts allows {rules.max_restarts})"
        )
    kind: EndKind = "fatal" if verdict.first.kind == "fatal" else "abnormal"
    return replace(verdict.first, who=name, kind=kind, reason=reason)


class Judge:
    """The state of one supervisor.

    Args:
        children: in the order of their start.
        rules: how to judge.

    Raises:
        ValueError: two children have one name, or nobody's end could be the supervisor's.
    """

    def __init__(self, children: Sequence[ChildRule], rules: Rules) -> None:
        self._children = {child.name: child for child in children}
        if len(self._children) < len(children):
            raise ValueError(f"two children have one name: {[c.name for c in children]}")
        if rules.until != "never" and not any(child.significant for child in children):
            raise ValueError(f"until={rules.until!r} needs a significant child")
        self._rules = rules
        self._since: dict[str, float] = {}
        """when each child that is up was started"""
        self._not_before: dict[str, float] = {}
        self._streaks: dict[str, int] = {}
        self._finished: set[str] = set()
        self._recent: deque[tuple[float, End]] = deque()
        self._over = False

    @property
    def up(self) -> tuple[str, ...]:
        """The children that are up, in the order of their start."""
        return tuple(name for name in self._children if name in self._since)

    def starts(self, name: str, now: float) -> None:
        """A child is being started. If that fails, it has `ended`.

        Raises:
            ValueError: after the verdict that ended all.
        """
        if self._over:
            raise ValueError(f"{name} is started although all is over")
        self._since[name] = now
        self._finished.discard(name)

    def ended(self, end: End, now: float) -> Verdict:
        """Judge an end. None if there is nothing to do: also for the end of a child that was told
        to stop, and for whatever ends after the verdict that ended all.
        """
        since = self._since.pop(end.who, None)
        if since is None or self._over:
            return None
        child = self._children[end.who]
        if end.kind == "fatal":
            return self._escalate(end, 1)
        if self._is_due(child, end):
            return self._restart(end, now, lived_s=now - since)
        return self._finish(child, end)

    @staticmethod
    def _is_due(child: ChildRule, end: End) -> bool:
        if child.restart == "transient":
            return end.kind != "normal"
        return child.restart == "permanent"

    def _finish(self, child: ChildRule, end: End) -> Finish | None:
        self._finished.add(child.name)
        significant = [c.name for c in self._children.values() if c.significant]
        until = self._rules.until
        over = until == "any" or (until == "all" and self._finished.issuperset(significant))
        if not (child.significant and over):
            return None
        self._over = True
        self._since.clear()
        return Finish(end)

    def _escalate(self, first: End, num_ends: int) -> Escalate:
        self._over = True
        self._since.clear()
        return Escalate(first, num_ends)

    def _restart(self, end: End, now: float, *, lived_s: float) -> Restart | Escalate:
        rules = self._rules
        while self._recent and now - self._recent[0][0] > rules.window_s:
            self._recent.popleft()
        self._recent.append((now, end))
        if len(self._recent) > rules.max_restarts:
            return self._escalate(self._recent[0][1], len(self._recent))
        group = self._group(end.who)
        start = tuple(n for n in group if self._children[n].restart != "temporary")
        stop = tuple(name for name in reversed(group) if name in self._since)
        for name in stop:
            del self._since[name]
        at = now + self._backoff(end.who, lived_s)
        # a sibling that waits already does not wait less because of this one
        at = max([at, *(self._not_before.get(name, at) for name in start)])
        self._not_before.update(dict.fromkeys(start, at))
        return Restart(stop, start, at)

    def _group(self, name: str) -> list[str]:
        names = list(self._children)
        match self._rules.strategy:
            case "one_for_one":
                return [name]
            case "one_for_all":
                return names
            case "rest_for_one":
                return names[names.index(name) :]

    def _backoff(self, name: str, lived_s: float) -> float:
        rules = self._rules
        streak = self._streaks.get(name, 0) if lived_s < rules.window_s else 0
        self._streaks[name] = streak + 1
        return min(rules.backoff_most_s, rules.backoff_first_s * 2.0 ** min(streak, _MAX_DOUBLINGS))
