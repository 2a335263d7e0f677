"""Contract tests for what a user brings of their own; needs no test framework.

Consumes a way to make it, runs it as a run would, with random data, and raises what the run would
raise. Waits for nothing.

    from ratchet.testing import check_buffer_policy

    def test_my_policy():
        check_buffer_policy(MyPolicy)
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType

from ratchet.actors.buffer_policy import BufferPolicy, Policy
from ratchet.types import Packed, Rollout, RolloutGroup, VersionSpan

__all__ = ["check_buffer_policy", "random_group"]


def check_buffer_policy(
    make: Callable[[], BufferPolicy], *, name: str | None = None, seed: int = 0, batches: int = 50
) -> None:
    """Run a policy of `buffer.custom` against random groups, in buffers of several sizes, two of
    each at once; groups leave as stale, and come again with a higher attempt.

    What it must do: name as many different groups as a batch has, of those that are there, or none;
    choose a batch from a full buffer; leave what it is shown as it is; share nothing with another
    object of its class; give finite metrics at any time.

    Args:
        make: makes a policy; the class itself, usually.
        name: what errors call it.
        seed: of the groups and their order; the same one gives the same calls.
        batches: to choose, for each size.

    Raises:
        RunFailed: the error that a run would end with.
    """
    rng = random.Random(seed)  # noqa: S311 - a test, the same from the same seed
    label = name or str(getattr(make, "__qualname__", make))
    for num_groups, capacity in [(1, 1), (1, 8), (3, 3), (4, 9), (8, 64)]:
        buffers = [_Buffer(Policy(label, make()), num_groups, capacity, rng) for _ in range(2)]
        for buffer in buffers:
            buffer.policy.metrics()
        while any(buffer.num_batches < batches for buffer in buffers):
            rng.choice(buffers).act()


def random_group(rng: random.Random, group_id: int, attempt: int = 0) -> RolloutGroup:
    """Return a group of one to four rollouts with random lengths, rewards and versions."""
    oldest = rng.randrange(5)
    return RolloutGroup(
        group_id,
        attempt,
        f"prompt-{group_id % 7}",
        group_id // 7,
        tuple(_random_rollout(rng, oldest) for _ in range(rng.randint(1, 4))),
    )


def _random_rollout(rng: random.Random, oldest: int) -> Rollout:
    length = rng.randint(1, 6)
    switch = rng.randint(1, length)
    spans = [VersionSpan(oldest, 0, switch), VersionSpan(oldest + 1, switch, length)]
    return Rollout(
        prompt_ids=Packed.of(range(rng.randint(1, 4)), "int32"),
        completion_ids=Packed.of(range(length), "int32"),
        behavior_logprobs=Packed.of([-1.0] * length, "float32"),
        loss_mask=Packed("uint8", b"\1" * length),
        spans=tuple(span for span in spans if span.start < span.end),
        finish_reason=rng.choice(["stop", "length"]),
        reward=rng.choice([0.0, 1.0, rng.random()]),
        seed=0,
    )


class _Buffer:
    """As much of a buffer as a policy sees."""

    def __init__(
        self,
        policy: Policy,
        num_groups: int,
        capacity: int,
        rng: random.Random,
    ) -> None:
        self.policy = policy
        self.num_batches = 0
        self._num_groups = num_groups
        self._capacity = capacity
        self._rng = rng
        self._finished: OrderedDict[int, RolloutGroup] = OrderedDict()
        self._again: list[tuple[int, int]] = []
        self._num_issued = 0

    def act(self) -> None:
        """Let one thing happen."""
        what = self._rng.random()
        if what < 0.05 and self._finished:
            self._leave()
        elif len(self._finished) < self._capacity and what < 0.7:
            self._finish()
        elif len(self._finished) >= self._num_groups:
            self._get()

    def _finish(self) -> None:
        group_id, attempt = self._num_issued, 0
        if self._again and self._rng.random() < 0.5:
            group_id, attempt = self._again.pop()
        else:
            self._num_issued += 1
        group = random_group(self._rng, group_id, attempt)
        self._finished[group_id] = group
        self.policy.put(group)

    def _leave(self) -> None:
        group_id = self._rng.choice(list(self._finished))
        gone = self._finished.pop(group_id)
        if self._rng.random() < 0.5:
            self._again.append((group_id, gone.attempt + 1))

    def _get(self) -> None:
        ids = self.policy.get(self._num_groups, MappingProxyType(self._finished))
        if not ids and len(self._finished) == self._capacity:
            raise self.policy.waits_for_nothing(self._num_groups, len(self._finished))
        if ids:
            self.num_batches += 1
            self.policy.metrics()
        for group_id in ids:
            del self._finished[group_id]
