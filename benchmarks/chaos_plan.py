"""What `benchmarks.chaos` does to a run, and what became of it. Pure; waits for nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import chaos_reward
from tests.helpers.config import small_config

from ratchet.config import Config

TARGETS = (
    "trainer-step",
    "trainer-transfer",
    "trainer-checkpoint",
    "registry",
    "registry-commit",
    "buffer",
    "rollout",
    "launcher",
)
NUM_WORKERS = 2
REWARD_WORKERS = 2
ROLES = ("registry", "buffer", "trainer-0", "rollout-0", "rollout-1")
NUM_PROMPTS = 26
"""of the task below: 40 less those held out"""
BATCH_GROUPS = 4


@dataclass(frozen=True)
class Plan:
    """What to do to a run; all of it follows from the seed."""

    num_kills: int
    seed: int
    targets: Sequence[str] = TARGETS
    every: int = 3
    """steps from one kill to the next"""
    checkpoint_steps: int = 2
    group_size: int = 32
    """the more, the longer a step"""
    reward_s: float = 0.0
    """for a group; with NUM_WORKERS x REWARD_WORKERS of them side by side, about what a step takes
    """
    patience_s: float = 120.0

    def kills(self) -> list[tuple[str, float, int]]:
        """Return target, moment (0 to 1, of an ordinary step) and worker of each kill."""
        draw = random.Random(self.seed)
        return [
            (draw.choice(self.targets), draw.random(), draw.randrange(NUM_WORKERS))
            for _ in range(self.num_kills)
        ]

    def config(self) -> Config:
        """Return a copy job that does not end by itself."""
        task = {"name": "copy", "args": {"digits": 3, "num_prompts": 40, "holdout": 14}}
        if self.reward_s:
            task |= {
                "reward": f"{chaos_reward.__name__}:{chaos_reward.score.__name__}",
                "reward_isolation": "thread",
                "reward_workers": REWARD_WORKERS,
            }
        return small_config(
            task=task,
            rollout={"max_tokens": 5, "group_size": self.group_size, "num_workers": NUM_WORKERS},
            buffer={"batch_groups": BATCH_GROUPS},
            trainer={"num_steps": 1_000_000, "lr": 1e-3},
            checkpoint={"every_steps": self.checkpoint_steps, "keep": 2},
            runtime={"max_restarts": 10 * self.num_kills},
        )


@dataclass(frozen=True)
class Kill:
    """One kill that was made."""

    target: str
    name: str
    """of the process"""
    at: float
    step: int
    """the newest line of metrics then"""
    hit: bool
    """whether the moment was not over: the version is still reserved, the checkpoint unfinished"""


@dataclass
class Outcome:
    """What became of a run."""

    kills: list[Kill] = field(default_factory=list)
    stayed: dict[int, float] = field(default_factory=dict)
    """when the line of each step came for the last time"""
    took_s: float = 0.0
    """to the last kill"""
    num_lines: int = 0
    """of metrics, before the run was told to end"""
    num_lost: int = 0
    """lines of metrics that later lives had taken back by then"""
    num_batches: int = 0
    """that had been handed out by then"""
    num_steps: int = 0
    """at the end of the run"""

    def next_s(self, kill: Kill, nth: int) -> float:
        """Return the seconds from a kill to the nth next step that stayed, from 0."""
        return sorted(at for at in self.stayed.values() if at > kill.at)[nth] - kill.at
