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

Masking. A token past the bound can be masked instead, and the rest of its group trained
(`mask_stale`): the group is then as stale as its oldest token that is still trained.

The bound. A group is judged twice: when a batch is taken, and again at the optimiser step, both
times against the weights that take the step. A batch is asked for by (version, step) of exactly
those weights, and the trainer takes no other step in between, so the two verdicts agree unless a
take-over happened in between; then the second one decides. A group whose oldest token exceeds
`max_staleness` is never trained: the check is made on the trainer's own lineage, in the process
that takes the step.

Bounded admission. The verdicts throw away what is too old; with `buffer.admission = "bounded"`
there is nothing to throw away. With B groups a batch and the bound m = `max_staleness`, let P be
the position that the next batch trains at (a batch that is out counts as trained), and the age of
an open group its staleness at P: once finished, that of its oldest token; in flight, that of the
version that its worker held when it was issued. Kept is

    for each d from 0 to m + 1: at most B x (m + 1 - d) open groups are of age d or more    (1)

No less would do: what is of age d or more must be in one of the next m + 1 - d batches. (It is the
condition of P. Hall, On Representatives of Subsets, 1935, for groups that choose among batches.)
Two rules keep it:

* Issue (`most_open`). To a worker whose version is of age v <= m at P, while afterwards at most
  B x (m + 1 - v) groups are open. So a slot is freed when the version trained on it is there, as in
  AReaL (arXiv:2505.24298), and what begins has the most steps before it.
* Batch (`must_go`, `first_batch`). First in, first out by finish, but with what must go for (1) to
  hold at P + 1; if that is in flight still, the trainer waits for it.

Claim: on an unbroken lineage every group is within the bound when it is trained. That is (1) for
d = m + 1, and (1) holds always:

1. An engine never goes back, so a finish raises no age. A drop, a failure, a lease that ends and a
   retry take a group out (what waits to be issued again is not open). A step that is rejected or
   skipped puts P back, and all ages fall.
2. After an issue, those of age d <= v or more are at most all that are open, which is at most
   B x (m + 1 - v) <= B x (m + 1 - d); for d > v their number is what it was.
3. A batch that is taken raises all ages by 1, and is taken only if (1) holds then.

Counting what was begun, as AReaL does, bounds no straggler: later groups overtake it, and their
slots are given out again, for ever. Here it is overtaken for m batches and must be in the next one.

Progress. What is in flight ends, at the latest with its lease. Let all have ended. If fewer than B
are open, there is room for every worker whose version is within the bound, and where there is none,
the next version that is loaded makes room. If B or more are, the B oldest may go: of those of age d
or more at most B x (m + 1 - d) - B are left. With m = 0 this is synchronous training: room for one
batch, freed by the version trained on it.

Outside the claim: after a take-over, or a restore from an older checkpoint, the path leads through
another branch; and a producer of the user's own may name any version. There the verdicts decide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from ratchet.types import Packed, PolicyVersion, Rollout, RolloutGroup, VersionRecord


class Position(NamedTuple):
    """Where a trainer stands: the newest version on its lineage, and its optimiser steps (at least
    that version's).
    """

    version: PolicyVersion
    step: int


def most_open(batch_groups: int, max_staleness: int, capacity: int, staleness: int) -> int:
    """Return how many groups may be in flight and finished at once after an issue; B x (m + 1 -
    staleness) at most, and one batch at least while that is more than 0.

    Args:
        batch_groups: B, groups that a step trains.
        max_staleness: m, the bound, in optimiser steps.
        capacity: groups for which there is place, at least a batch; what is trained into a version
            that the worker does not hold yet keeps its own.
        staleness: for the next batch, of the version that the worker holds.
    """
    if staleness > max_staleness:
        return 0
    places = min(capacity, batch_groups * (max_staleness + 1))
    return max(batch_groups, places - batch_groups * staleness)


def must_go(batch_groups: int, max_staleness: int, ages: Mapping[int, int]) -> list[int]:
    """Return for each age from 0 to m how many open groups of at least that age the next batch must
    have for (1) to hold after it; never more than a batch, also where (1) does not hold before it.

    Args:
        batch_groups: B, groups that a step trains.
        max_staleness: m, the bound, in optimiser steps.
        ages: age -> number of open groups, for ages up to m.
    """
    needed = [0] * (max_staleness + 1)
    num_older = 0
    for age in range(max_staleness, -1, -1):
        num_older += ages.get(age, 0)
        excess = num_older - batch_groups * (max_staleness - age)
        needed[age] = min(batch_groups, max(0, excess))
    return needed


def first_batch(batch_groups: int, needed: Sequence[int], ages: Iterable[int]) -> list[int] | None:
    """Return the batch that comes first in the order of finish, among all with what must go.

    Args:
        batch_groups: B, groups of a batch.
        needed: `must_go`.
        ages: of the finished groups, up to m, oldest finish first.

    Returns:
        Indices of `ages`, ascending; None if what has finished makes no such batch.
    """
    missing = list(needed)
    batch: list[int] = []
    for index, age in enumerate(ages):
        places = batch_groups - len(batch)
        if any(number >= places for number in missing[age + 1 :]):
            continue  # all places that are left are for older ones
        batch.append(index)
        if places == 1:
            break
        for younger in range(age + 1):
            missing[younger] -= 1
    else:
        return None
    return batch


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

    def path(self, version: PolicyVersion) -> Iterator[PolicyVersion]:
        """Yield a version and its ancestors, the newest first."""
        node: PolicyVersion | None = version
        while node is not None:
            yield node
            node = self._node(node)[1]

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

    def mask_stale(
        self, group: RolloutGroup, position: Position, max_staleness: int
    ) -> RolloutGroup | None:
        """Return the group without its tokens past the bound: `loss_mask` is 0 there.

        The group itself is never changed, and is returned where no token is past the bound.

        Returns:
            None if nothing is left to train.
        """
        stale = {v for v in group.versions if self.staleness(v, position) > max_staleness}
        if not stale:
            return group
        rollouts = tuple(_without(rollout, stale) for rollout in group.rollouts)
        left = msgspec.structs.replace(group, rollouts=rollouts)
        return left if left.num_trained_tokens else None

    def _node(self, version: PolicyVersion) -> tuple[int, PolicyVersion | None]:
        try:
            return self._nodes[version]
        except KeyError:
            raise UnknownVersion(version) from None


def _without(rollout: Rollout, versions: Collection[PolicyVersion]) -> Rollout:
    """Return the rollout with the tokens of these versions masked."""
    mask = bytearray(rollout.loss_mask.data)
    for span in rollout.spans:
        if span.version in versions:
            mask[span.start : span.end] = bytes(span.end - span.start)
    return msgspec.structs.replace(rollout, loss_mask=Packed("uint8", bytes(mask)))
