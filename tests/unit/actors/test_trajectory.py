from __future__ import annotations

import numpy as np

from ratchet.actors.trajectory import Trajectory, sample_seed, turn_seed
from ratchet.backends.rollout.base import Completion
from ratchet.tasks.base import Conversation
from ratchet.types import FinishReason, Packed, VersionSpan


def completion(
    ids: list[int], *spans: tuple[int, int, int], reason: FinishReason = "stop"
) -> Completion:
    return Completion(
        Packed.of(ids, "int32"),
        Packed.of([-float(token) for token in ids], "float32"),
        tuple(VersionSpan(*span) for span in spans),
        reason,
    )


def test_turns_and_replies_are_one_sample_that_trains_what_was_sampled() -> None:
    trajectory = Trajectory([1, 2], seed=9)
    trajectory.add_turn(completion([3, 4, 5], (0, 0, 2), (1, 2, 3)), "abc")
    assert list(trajectory.token_ids) == [1, 2, 3, 4, 5]
    trajectory.add_reply([6, 7], "no")
    trajectory.note({"left": 1})
    trajectory.add_turn(completion([8], (1, 0, 1), reason="length"), "d")
    rollout = trajectory.rollout(0.5)
    assert list(trajectory.token_ids) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert rollout.prompt_ids.numpy().tolist() == [1, 2]
    assert rollout.completion_ids.numpy().tolist() == [3, 4, 5, 6, 7, 8]
    assert rollout.loss_mask.numpy().tolist() == [1, 1, 1, 0, 0, 1]
    assert rollout.behavior_logprobs.numpy().tolist() == [-3.0, -4.0, -5.0, 0.0, 0.0, -8.0]
    assert rollout.behavior_logprobs.numpy().dtype == np.float32
    assert (rollout.finish_reason, rollout.reward, rollout.seed) == ("length", 0.5, 9)
    assert trajectory.conversation == Conversation(("abc", "d"), ("no",), {"left": 1}, 9)


def test_a_reply_adds_no_version() -> None:
    trajectory = Trajectory([1], seed=0)
    trajectory.add_turn(completion([2], (3, 0, 1)), "")
    trajectory.add_reply([5, 5], "")
    trajectory.add_turn(completion([2, 2], (4, 0, 2)), "")
    trajectory.add_reply([5], "")
    trajectory.add_turn(completion([2], (4, 0, 1)), "")
    rollout = trajectory.rollout(0.0)
    assert rollout.spans == (VersionSpan(3, 0, 3), VersionSpan(4, 3, 7))
    assert trajectory.versions == {3, 4}
    assert (rollout.min_version, rollout.max_version) == (3, 4)


def test_each_turn_draws_anew() -> None:
    seed = sample_seed(0, 1, 2, 3)
    seeds = [turn_seed(seed, turn) for turn in range(5)]
    assert seeds[0] == seed
    assert len({*seeds, *(turn_seed(seed + 1, turn) for turn in range(5))}) == 10
    assert all(0 <= value < 2**63 for value in seeds)
