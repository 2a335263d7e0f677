"""Staleness by lineage: how many optimiser steps lie between the policy that made a token and the
one about to train it.

Pure: consumes version records and returns numbers; waits for nothing.

Each version has a parent, so the versions form a tree: a line while a run goes on unbroken, a
branch after a restore from an older checkpoint. The staleness of version v for a trainer at
position (p, s), that is version p and s optimiser steps on its lineage, is the length in steps of
the tree path between them through their lowest common ancestor a:

    staleness(v) = (step(v) - step(a)) + (s - step(a))

On an unbroken line a = v and this is s - step(v). Both terms are at least 0 because steps never
decrease from parent to child, so staleness is never negative; a sample of an abandoned branch
counts the steps of both branches.

The bound. A group is judged twice: when a batch is taken, and again at the optimiser step, both
times against the weights that take the step. A batch is asked for by (version, step) of exactly
those weights, and the trainer takes no other step in between, so the two verdicts agree unless a
take-over happened in between; then the second one decides. A group whose oldest token exceeds
`max_staleness` is never trained: the check is made on the trainer's own lineage, in the process
that takes the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ratchet.types import PolicyVersion, RolloutGroup, VersionRecord


class Position(NamedTuple):
    """Where a trainer stands: the newest version on its lineage, and its optimiser steps (at least
    that version's).
    """

    version: PolicyVersion
    step: int


class UnknownVersion(KeyError):  # noqa: N818
    """A version that the lineage has not heard of; ask the registry before judging."""


class Lineage:
    """The tree of versions, as far as it is known here."""

    def __init__(self, records: Iterable[VersionRecord] = ()) -> None:
        self._nodes: dict[PolicyVersion, tuple[int, PolicyVersion | None]] = {}
        self._rooted: set[PolicyVersion] = set()  # known down to the root, and so for ever
        for record in records:
            self.add(record.version, record.step, record.parent)

    def __contains__(self, version: PolicyVersion) -> bool:
        return version in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, version: PolicyVersion, step: int, parent: PolicyVersion | None) -> None:
        """Add a version. Adding the same one again is allowed, changing it is not.

        Raises:
            ValueError: if the version is known with another step or parent, or is not after its
            parent.
        """
        node = (step, parent)
        if self._nodes.setdefault(version, node) != node:
            msg = f"version {version} is known as (step, parent) {self._nodes[version]}, not {node}"
            raise ValueError(msg)
        if parent is not None and (
            parent >= version or (parent in self._nodes and self._nodes[parent][0] > step)
        ):
            del self._nodes[version]
            msg = f"version {version} (step {step}) cannot follow its parent {parent}"
            raise ValueError(msg)

    def unknown(self, versions: Iterable[PolicyVersion]) -> tuple[PolicyVersion, ...]:
        """Return those versions, and the ancestors of known ones, that are missing here.

        Each version is walked over once, however long the run is and however often this is asked.
        """
        missing: set[PolicyVersion] = set()
        for version in versions:
            path: list[PolicyVersion] = []
            node: PolicyVersion | None = version
            while node is not None and node not in self._rooted:
                if node not in self._nodes:
                    missing.add(node)
                    break
                path.append(node)
                node = self._nodes[node][1]
            else:
                self._rooted.update(path)
        return tuple(sorted(missing))

    def step(self, version: PolicyVersion) -> int:
        """Return the optimiser step of a version."""
        return self._node(version)[0]

    def staleness(self, version: PolicyVersion, position: Position) -> int:
        """Return the optimiser steps on the path between `version` and `position`; never negative.

        Raises:
            UnknownVersion: if a version on the path is not known here.
            ValueError: if the two have no common ancestor, or the position lies before its own
            version.
        """
        if position.step < self.step(position.version):
            msg = (
                f"position {position} lies before step {self.step(position.version)} of its version"
            )
            raise ValueError(msg)
        left: PolicyVersion | None = version
        right: PolicyVersion | None = position.version
        while left != right:  # a parent's number is always lower, so the higher of the two climbs
            if right is None or (left is not None and left > right):
                left = self._node(left)[1] if left is not None else None
            else:
                right = self._node(right)[1]
        if left is None:
            msg = f"versions {version} and {position.version} have no common ancestor"
            raise ValueError(msg)
        meet = self.step(left)
        return (self.step(version) - meet) + (position.step - meet)

    def group_staleness(self, group: RolloutGroup, position: Position) -> int:
        """Return the staleness of the oldest token of a group."""
        return max(self.staleness(version, position) for version in group.versions)

    def split_stale(
        self, groups: Iterable[RolloutGroup], position: Position, max_staleness: int
    ) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
        """Return the groups within the bound, and those past it."""
        fresh: list[RolloutGroup] = []
        stale: list[RolloutGroup] = []
        for group in groups:
            past = self.group_staleness(group, position) > max_staleness
            (stale if past else fresh).append(group)
        return fresh, stale

    def _node(self, version: PolicyVersion) -> tuple[int, PolicyVersion | None]:
        try:
            return self._nodes[version]
        except KeyError:
            raise UnknownVersion(version) from None
