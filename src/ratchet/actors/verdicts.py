"""The verdicts on groups: kept, dropped, issued again, or trained in part; and why.

Consumes an entry of the group table with a finished group, a failure, the staleness of its tokens
or a rejection by the trainer; produces a `Verdict`. Changes nothing, and waits for nothing.

1. At finish: a group with an aborted or failed rollout goes to the unused handler, and so does a
   failure. What is left then meets the filters, whose rejects are dropped as "filter:<name>":
   they never see the handler, or hard prompts would be tried until they come out easy.
2. At get: a group whose oldest token is past `max_staleness`, for the weights that take the step,
   goes to the handler.
3. At the step: what the trainer rejects goes to the handler, but for what its own filter rejects.

The unused handler is `buffer.unused`. Whatever it says, "retry" past `max_retries` is a drop, and
so is "mask" where nothing is left to train: a failure has no rollouts, an aborted group is left
its whole rollouts, a stale one its tokens within the bound, a rejected one nothing. Dropped groups
keep the reason that brought them to the handler.

A handler of the user's own is "module:function", called in the buffer's process as
`function(unused: UnusedGroup) -> "drop" | "retry" | "mask"`, with the same duties as a filter. For
a stale group that it masks, it is asked again only once nothing is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple, TypeAlias, cast, get_args

from ratchet.actors.entry import Entry
from ratchet.actors.filters import (
    Watch,
    call_own,
    load_filters,
    load_function,
    mask_aborted,
    unwatched,
    why_aborted,
)
from ratchet.config import BufferConfig, UnusedName
from ratchet.errors import RunFailed
from ratchet.types import PolicyVersion, RolloutGroup, UnusedGroup

_Handler: TypeAlias = Callable[[UnusedGroup], UnusedName]


class Verdict(NamedTuple):
    """What becomes of a group."""

    action: Literal["keep", "drop", "retry", "mask"]
    """retry: its prompt is issued again, as it was; mask: what is left of it is trained"""
    reason: str = ""
    """one word, or "filter:<name>"; empty for keep"""


KEEP: Final = Verdict("keep")


class Verdicts:
    """The rules of one run."""

    def __init__(self, config: BufferConfig, watch: Watch = unwatched) -> None:
        """Load what the configuration names, each call of it to be watched.

        Raises:
            ConfigError: if a filter or a handler does not import, or cannot be called.
        """
        self._filters = load_filters(config, watch)
        self._handler = _load_handler(config.unused, watch)
        self._max_retries = config.max_retries
        self._max_staleness = config.max_staleness

    def at_finish(self, entry: Entry) -> Verdict:
        """Judge the group that has just come in; for "mask" train `mask_aborted` of it."""
        verdict, group = KEEP, _group_of(entry)
        if reason := why_aborted(group):
            group = mask_aborted(group)
            verdict = self._unused(entry, reason, is_left=bool(_trained_versions(group)))
            if verdict.action != "mask":
                return verdict
        for name, keeps in self._filters:
            if not keeps(group):
                return Verdict("drop", f"filter:{name}")
        return verdict

    def at_failure(self, entry: Entry, reason: str, detail: str) -> Verdict:
        """Judge a group that has no rollouts."""
        return self._unused(entry, reason, detail=detail)

    def at_get(self, entry: Entry, staleness: Mapping[PolicyVersion, int]) -> Verdict:
        """Judge a finished group for the weights that would train it.

        Args:
            entry: the group.
            staleness: of each version of the group, for those weights.
        """
        oldest = max((staleness[version] for version in entry.versions), default=0)
        if oldest <= self._max_staleness:
            return KEEP
        is_left = any(
            staleness[version] <= self._max_staleness
            for version in _trained_versions(_group_of(entry))
        )
        if is_left and entry.masked == "stale":
            return Verdict("mask", "stale")
        return self._unused(entry, "stale", staleness=oldest, is_left=is_left)

    def at_step(self, entry: Entry, reason: str) -> Verdict:
        """Judge a group that the trainer was handed and did not train."""
        if reason.startswith("filter:"):
            return Verdict("drop", reason)
        return self._unused(entry, reason)

    def _unused(
        self,
        entry: Entry,
        reason: str,
        *,
        detail: str = "",
        staleness: int | None = None,
        is_left: bool = False,
    ) -> Verdict:
        action = self._handler(
            UnusedGroup(entry.prompt, reason, detail, entry.retries, staleness, entry.group)
        )
        if action == "retry" and entry.retries >= self._max_retries:
            action = "drop"
        if action == "mask" and not is_left:
            action = "drop"
        return Verdict(action, reason)


def _load_handler(choice: str, watch: Watch) -> _Handler:
    known = get_args(UnusedName)
    if choice in known:
        return lambda _: cast("UnusedName", choice)
    field, answers = "buffer.unused", " | ".join(f'"{name}"' for name in known)
    function = load_function(field, choice, "unused: UnusedGroup", answers)

    def decide(unused: UnusedGroup) -> UnusedName:
        with watch(f"{field}: {choice}"):
            answer = call_own(field, choice, function, unused)
        if answer not in known:
            msg = f"{field}: {choice!r} returned {answer!r}, not one of {answers}"
            raise RunFailed(msg)
        return cast("UnusedName", answer)

    return decide


def _group_of(entry: Entry) -> RolloutGroup:
    if entry.group is None:
        msg = f"group {entry.group_id} is not finished"
        raise RuntimeError(msg)
    return entry.group


def _trained_versions(group: RolloutGroup) -> set[PolicyVersion]:
    """Return the versions of the tokens that the loss mask leaves."""
    return {
        span.version
        for rollout in group.rollouts
        for span in rollout.spans
        if any(rollout.loss_mask.data[span.start : span.end])
    }
