from __future__ import annotations

import msgspec
import numpy as np
import pytest

from ratchet.types import Packed, Rollout, RolloutGroup, VersionSpan


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "uint8"])
def test_packed_arrays_survive_the_wire(dtype: str) -> None:
    packed = Packed.of([0, 1, 2, 250], dtype)  # type: ignore[arg-type]
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=Packed)
    assert again == packed
    assert len(again) == 4
    assert again.numpy().dtype == np.dtype(dtype)
    assert again.numpy().tolist() == [0, 1, 2, 250]


def test_packed_values_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Packed.of([1, 2], "int32").numpy()[0] = 3


def test_a_group_knows_its_rewards_tokens_and_versions() -> None:
    rollout = Rollout(
        Packed.of([5], "int32"),
        Packed.of([6, 7, 1], "int32"),
        Packed.of([-1.0, -0.5, 0.0], "float32"),
        Packed.of([1, 1, 1], "uint8"),
        (VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)),
        "stop",
        0.5,
        9,
    )
    group = RolloutGroup(1, 0, "p", 0, (rollout, rollout))
    assert (rollout.min_version, rollout.max_version) == (3, 4)
    assert group.versions == (3, 4)
    assert group.rewards == (0.5, 0.5)
    assert group.num_tokens == 6


def sample(reward: float, trajectory: int | None = None) -> Rollout:
    ids, logprobs, mask = (
        Packed.of([6], "int32"),
        Packed.of([-1], "float32"),
        Packed.of([1], "uint8"),
    )
    spans = (VersionSpan(0, 0, 1),)
    return Rollout(ids, ids, logprobs, mask, spans, "stop", reward, 0, trajectory)


def test_samples_of_one_number_are_one_trajectory_and_count_once() -> None:
    samples = (sample(0.5, 0), sample(1.0), sample(0.25, 1), sample(0.5, 0), sample(1.0))
    group = RolloutGroup(1, 0, "p", 0, samples)
    first, second, third, fourth = group.trajectories
    assert first == (samples[0], samples[3])
    assert (second, third, fourth) == ((samples[1],), (samples[2],), (samples[4],))
    assert group.rewards == (0.5, 1.0, 0.25, 1.0)
    assert group.num_tokens == 5
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(group), type=RolloutGroup)
    assert again.trajectories == group.trajectories
