from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.helpers.samples import group_of, sample

from ratchet.actors.buffer_metrics import buffer_metrics, consumed_staleness
from ratchet.stats import BufferStats, Population, Tally
from ratchet.types import Packed


def test_what_is_unused_is_told_by_cause_whatever_became_of_it() -> None:
    found = buffer_metrics(
        BufferStats(
            dropped={"stale": 2, "aborted": 1, "filter:zero_spread": 4, "filter:batch": 1},
            retried={"stale": 1, "aborted": 2, "reward_raised": 3, "non_finite": 1},
            reissued={"worker_died": 5},
            masked={"aborted": 7},
        )
    )
    assert (found["buffer/stale_groups"], found["buffer/aborted_groups"]) == (3, 3)
    assert found["buffer/filtered"] == {"zero_spread": 4, "batch": 1}
    assert found["buffer/failed"] == {"reward_raised": 3}
    assert found["buffer/reissued"] == {"worker_died": 5}
    assert found["buffer/masked"] == {"aborted": 7}


def test_the_three_populations_stand_side_by_side_and_tasks_where_there_are_some() -> None:
    rewards = Tally()
    rewards.add((0.0, 1.0))
    offered = Population(1, rewards=rewards.read(), task_rewards={"copy": rewards.read()})
    found = buffer_metrics(BufferStats(offered=offered, custom={"buffer/custom/x": 1.5}))
    assert found["buffer/offered/groups"] == 1
    assert found["buffer/offered/reward"]["mean"] == 0.5
    assert found["buffer/offered/task_reward"]["copy"]["mean"] == 0.5
    assert found["buffer/lost/reward"]["mean"] is found["buffer/trained/tokens"]["p99"] is None
    assert "buffer/lost/task_reward" not in found
    assert found["buffer/custom/x"] == 1.5


def test_staleness_is_of_trained_tokens_and_spread_is_within_a_rollout() -> None:
    old = msgspec.structs.replace(sample(0.0, 0, 1, 1), loss_mask=Packed("uint8", b"\0\1\1"))
    groups = [group_of(sample(1.0, 1, 3), old), group_of(sample(0.0, 3, 3, 3))]
    found = consumed_staleness(groups, {0: 9, 1: 2, 3: 0})
    assert found["buffer/staleness_histogram"] == {"0": 1, "2": 1}
    assert (found["buffer/staleness_mean"], found["buffer/staleness_max"]) == (1.0, 2)
    assert found["buffer/token_staleness"]["histogram"] == {"0": 4, "2": 3}
    assert found["buffer/version_spread_max"] == 2
    assert found["buffer/version_spread_mean"] == pytest.approx(2 / 3)
    assert found["buffer/two_version_rollouts"] == 2


def test_every_field_is_defined_in_the_documentation() -> None:
    reward = Tally()
    reward.add((1.0,))
    population = Population(task_rewards={"copy": reward.read()})
    fields = {**buffer_metrics(BufferStats(offered=population)), **consumed_staleness([], {})}
    text = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in fields if f"`{name}`" not in text] == []
    assert [name for name in reward.read().summary() if f"`{name}`" not in text] == []
