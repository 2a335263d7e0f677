"""What has happened to groups since the last batch; a new window begins when it is read.

Pure: consumes the transitions of the group table, produces counters and distributions, all bounded
however long no batch goes out; waits for nothing. Each finished group counts once as offered, and
then once as trained or lost, or it is still queued or batched:

    offered + requeued = trained + lost + (queued + batched, now) - (the same, before)
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from ratchet.actors.filters import whole_rewards
from ratchet.stats import NOBODY, Population, Tally
from ratchet.tasks.mixture import label_of
from ratchet.types import RolloutGroup


class Made(msgspec.Struct, frozen=True, gc=False):
    """What a finished group is made of, for as long as it is open."""

    tokens: tuple[int, ...]
    """completion tokens of each rollout"""
    rewards: tuple[float, ...]
    """of each trajectory that came to its end"""
    finished_at: float
    """on the clock of the process"""

    @classmethod
    def of(cls, group: RolloutGroup, now: float) -> Made:
        """Measure a group."""
        tokens = tuple(len(rollout.completion_ids) for rollout in group.rollouts)
        return cls(tokens, tuple(whole_rewards(group)), now)

    @property
    def mean_and_deviation(self) -> tuple[float | None, float | None]:
        """The mean of the rewards and their population standard deviation; `statistics` computes in
        fractions, which takes longer than all else that is done with a group.
        """
        values = self.rewards
        if not values:
            return None, None
        mean = sum(values) / len(values)
        return mean, math.dist(values, (mean,) * len(values)) / math.sqrt(len(values))


@dataclass(slots=True)
class Groups:
    """The groups that have come to one place."""

    num_groups: int = 0
    tokens: Tally = field(default_factory=Tally)
    rewards: Tally = field(default_factory=Tally)
    task_rewards: dict[str, Tally] = field(default_factory=dict)

    def add(self, made: Made | None, label: str | None) -> None:
        """Count a group; of one from an earlier life of the buffer only that it was there."""
        self.num_groups += 1
        if made is None:
            return
        self.tokens.add(made.tokens)
        self.rewards.add(made.rewards)
        if label is not None:
            self.task_rewards.setdefault(label, Tally()).add(made.rewards)

    def read(self) -> Population:
        """Return it as it is now."""
        if not self.num_groups:
            return NOBODY
        tasks = {label: tally.read() for label, tally in sorted(self.task_rewards.items())}
        return Population(self.num_groups, self.tokens.read(), self.rewards.read(), tasks)


@dataclass(slots=True)
class Window:
    """The counters of one window."""

    by_task: bool = False
    """whether there are several tasks"""
    offered: Groups = field(default_factory=Groups)
    trained: Groups = field(default_factory=Groups)
    lost: Groups = field(default_factory=Groups)
    num_requeued: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    retried: Counter[str] = field(default_factory=Counter)
    """by the unused handler, by reason"""
    reissued: Counter[str] = field(default_factory=Counter)
    masked: Counter[str] = field(default_factory=Counter)
    """handed out in part, by reason"""
    claim_to_finish: Tally = field(default_factory=Tally)
    finish_to_train: Tally = field(default_factory=Tally)
    rejected_staleness: Tally = field(default_factory=Tally)

    def finished(self, prompt_id: str, made: Made, claimed_at: float) -> None:
        """A claimed group has come in."""
        self.offered.add(made, self._label(prompt_id))
        self.claim_to_finish.add((made.finished_at - claimed_at,))

    def has_trained(self, prompt_id: str, made: Made | None, now: float) -> None:
        """A step has trained a group."""
        self.trained.add(made, self._label(prompt_id))
        if made is not None:
            self.finish_to_train.add((now - made.finished_at,))

    def has_lost(self, prompt_id: str, made: Made | None) -> None:
        """A finished group will not be trained as it is."""
        self.lost.add(made, self._label(prompt_id))

    def next(self) -> Window:
        """Return the window that follows."""
        return Window(self.by_task)

    def _label(self, prompt_id: str) -> str | None:
        return label_of(prompt_id) if self.by_task else None
