"""Which finished groups the next batch takes: the built-in policy, and one of the user's own.

Consumes the finished groups and the size of a batch, produces the ids of the batch, or none of
them, to wait; pure, and waits for nothing itself.

`buffer.custom = "module:Class"` names a class that is called without arguments, in the buffer's
process, and whose object has the three methods of `BufferPolicy`. It decides the order, and nothing
else: the buffer keeps the groups, the leases, the ledger, the caps and the verdicts. A policy
cannot lose a group (what it never names stays, until it is stale), nor train one twice, nor make
one up: `Policy` refuses such an answer, and names the class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Final, NoReturn, ParamSpec, Protocol, TypeVar

from ratchet.actors.filters import Watch, unwatched
from ratchet.config import BufferConfig
from ratchet.errors import ConfigError, RunFailed
from ratchet.imports import import_for
from ratchet.types import RolloutGroup

P = ParamSpec("P")
R = TypeVar("R")

_METHODS: Final = ("put", "get", "metrics")


class BufferPolicy(Protocol):
    """The contract; `ratchet.testing.check_buffer_policy` tests it.

    Called from one thread. The buffer does nothing else meanwhile: a method must be quick, and read
    no network. What raises fails the run.
    """

    def put(self, group: RolloutGroup) -> None:
        """Take note of a group that has finished and passed its filters; it is in `finished` from
        now on. A group that was issued again comes again, with a higher `attempt`.
        """
        ...

    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        """Choose a batch.

        Args:
            num_groups: groups of a batch.
            finished: group id -> group, oldest finish first, read only: exactly what may be chosen.
                It has at least `num_groups`. None of them is past the staleness bound, unless it
                is masked (`buffer.unused`). Groups leave it without a word: in a batch, or as
                stale.

        Returns:
            `num_groups` different ids of `finished`, in the order of the batch; or nothing, to wait
            for the next finish. A policy that waits although nothing more can finish fails the
            run.
        """
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return numbers for the line of the step, read once per batch: name -> finite number.
        They appear as "buffer/custom/<name>".
        """
        ...


class Fifo:
    """First in, first out by finish: the built-in policy. A bounded admission has its own order
    (`due_first`).
    """

    def put(self, group: RolloutGroup) -> None:
        """Nothing to note: the order of `finished` is that of the finishes."""

    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        """Return the oldest."""
        return tuple(islice(finished, num_groups))

    def metrics(self) -> Mapping[str, float]:
        """Return nothing: the buffer's own numbers say it all."""
        return {}


class Policy:
    """A policy, and the checks of what it answers."""

    def __init__(self, name: str, policy: BufferPolicy, watch: Watch = unwatched) -> None:
        self._name = name
        self._policy = policy
        self._watch = watch

    @classmethod
    def load(cls, config: BufferConfig, watch: Watch = unwatched) -> Policy:
        """Make what `buffer.custom` names, each call of it to be watched; or the built-in one.

        Raises:
            ConfigError: if it does not import, cannot be called without arguments, or lacks one of
            the three methods.
        """
        if config.custom is None:
            return cls("Fifo", Fifo())
        return cls(config.custom, _make(config.custom), watch)

    def put(self, group: RolloutGroup) -> None:
        """Hand a finished group on.

        Raises:
            RunFailed: if the policy raises.
        """
        self._call("put", self._policy.put, group)

    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        """Return the ids of a batch, or nothing.

        Raises:
            RunFailed: if the policy raises, or answers anything but `num_groups` different ids of
            `finished`, or none at all.
        """
        ids: object = self._call("get", self._policy.get, num_groups, finished)
        if not isinstance(ids, Sequence) or any(type(each) is not int for each in ids):
            self._refuse(num_groups, ids, "is not a sequence of group ids (int)")
        if ids and len(ids) != num_groups:
            self._refuse(num_groups, ids, f"has {len(ids)} groups; a batch has {num_groups}")
        if len(set(ids)) != len(ids):
            self._refuse(num_groups, ids, "names a group twice")
        if strange := [each for each in ids if each not in finished]:
            self._refuse(num_groups, ids, f"names {strange}, which are not among the finished")
        return ids

    def metrics(self) -> dict[str, float]:
        """Return the numbers by their full names.

        Raises:
            RunFailed: if the policy raises, or one is not a finite number.
        """
        found = self._call("metrics", self._policy.metrics)
        values: Mapping[str, object] = found
        for name, value in values.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                msg = f"{self._named('metrics')} gave {name!r} = {value!r}, not a finite number"
                raise RunFailed(msg)
        return {f"buffer/custom/{name}": float(value) for name, value in found.items()}

    def waits_for_nothing(self, num_groups: int, num_finished: int) -> RunFailed:
        """Return the error for a policy that waits where nothing more can finish."""
        return RunFailed(
            f"{self._named('get')} chose none of {num_finished} finished groups for a batch of"
            f" {num_groups}, and waits for more; but no group is in flight and there is no room"
            " for another, so none will come: it must choose a batch from a full buffer"
        )

    def _call(
        self, method: str, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        try:
            with self._watch(self._named(method)):
                return function(*args, **kwargs)
        except Exception as error:
            msg = f"{self._named(method)} raised {type(error).__name__}: {error}"
            raise RunFailed(msg) from error

    def _refuse(self, num_groups: int, ids: object, why: str) -> NoReturn:
        msg = f"{self._named('get')}: the answer {ids!r} for {num_groups} groups {why}"
        raise RunFailed(msg)

    def _named(self, method: str) -> str:
        return f"buffer.custom = {self._name!r}: {method}()"


def _make(reference: str) -> BufferPolicy:
    field = "buffer.custom"
    found = import_for(field, reference)
    if not callable(found):
        msg = f"{field} = {reference!r} names a {type(found).__name__}; name a class"
        raise ConfigError(msg)
    try:
        policy = found()
    except Exception as error:
        msg = (
            f"{field} = {reference!r} is made without arguments, which raised"
            f" {type(error).__name__}: {error}"
        )
        raise ConfigError(msg) from error
    missing = [name for name in _METHODS if not callable(getattr(policy, name, None))]
    if missing:
        msg = f"{field} = {reference!r} has no {', '.join(missing)}; it needs {', '.join(_METHODS)}"
        raise ConfigError(msg)
    made: BufferPolicy = policy
    return made
