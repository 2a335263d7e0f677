from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from tests.helpers.samples import group_of, sample, trained_tokens, user_code

from ratchet.actors.filters import load_filters, mask_aborted, whole_rewards, why_aborted
from ratchet.config import BufferConfig, FilterName
from ratchet.errors import ConfigError, RunFailed
from ratchet.types import Packed, RolloutGroup

MIXED = [sample(0.0), sample(1.0)]
ABORTED = sample(0.5, finish="abort", length=0)


def keeps(name: str, group: RolloutGroup, **limits: int) -> bool:
    ((found, keep),) = load_filters(BufferConfig(batch_groups=1, filters=(name,), **limits))
    assert found == name
    return keep(group)


@pytest.mark.parametrize(
    ("rollouts", "kept"),
    [
        (MIXED, True),
        ([sample(1.0), sample(1.0)], False),
        ([sample(1.0)], False),
        ([sample(1.0), ABORTED], False),  # what was aborted has no reward
        ([*MIXED, ABORTED], True),
        # one reward per trajectory, and one of them did not come to its end
        ([sample(1.0, trajectory=1), sample(1.0, trajectory=1), sample(0.0, trajectory=2)], True),
        (
            [
                sample(0.0, trajectory=1),
                sample(0.0, trajectory=1, finish="error"),
                sample(1.0),
                sample(1.0),
            ],
            False,
        ),
    ],
)
def test_zero_spread(rollouts: list[Any], kept: bool) -> None:
    assert keeps("zero_spread", group_of(*rollouts)) is kept


@pytest.mark.parametrize(
    ("lengths", "short_kept", "long_kept"),
    [((3, 4), True, True), ((2, 4), False, True), ((3, 5), True, False), ((2, 5), False, False)],
)
def test_one_rollout_is_enough_for_a_length(
    lengths: tuple[int, ...], short_kept: bool, long_kept: bool
) -> None:
    group = group_of(*(sample(length=length) for length in lengths), ABORTED)
    assert keeps("too_short", group, min_tokens=3) is short_kept
    assert keeps("too_long", group, max_tokens=4) is long_kept


def test_the_tokens_of_an_environment_do_not_count_as_length() -> None:
    two_of_four = msgspec.structs.replace(sample(length=4), loss_mask=Packed("uint8", b"\1\0\0\1"))
    assert not keeps("too_short", group_of(two_of_four), min_tokens=3)
    assert keeps("too_long", group_of(two_of_four), max_tokens=2)


def test_one_rollout_is_enough_for_a_truncation_or_an_abort() -> None:
    assert keeps("truncated", group_of(*MIXED))
    assert keeps("any_aborted", group_of(*MIXED, sample(finish="length")))
    assert not keeps("truncated", group_of(*MIXED, sample(finish="length")))
    assert not keeps("any_aborted", group_of(*MIXED, ABORTED))
    assert not keeps("any_aborted", group_of(*MIXED, sample(finish="error")))


def test_every_name_of_the_configuration_has_its_filter_in_the_order_given() -> None:
    names = get_args(FilterName)
    config = BufferConfig(batch_groups=1, filters=names[::-1], min_tokens=1, max_tokens=9)
    assert [name for name, _ in load_filters(config)] == list(names[::-1])
    assert all(keep(group_of(*MIXED)) for _, keep in load_filters(config))


def test_an_aborted_trajectory_is_masked_whole_and_the_group_keeps_its_size() -> None:
    group = group_of(
        sample(1.0, trajectory=1),
        sample(0.25, trajectory=2),
        sample(0.25, trajectory=2, finish="abort"),
        sample(0.0, finish="error"),
        sample(0.5, finish="length"),
    )
    masked = mask_aborted(group)
    assert trained_tokens(masked) == [2, 0, 0, 0, 2]
    assert trained_tokens(group) == [2] * 5
    assert whole_rewards(masked) == whole_rewards(group) == [1.0, 0.5]


def test_why_a_group_is_aborted() -> None:
    error, abort = sample(finish="error"), sample(finish="abort")
    assert why_aborted(group_of(*MIXED, sample(finish="length"))) is None
    assert why_aborted(group_of(*MIXED, error)) == "generation"
    assert why_aborted(group_of(error, abort)) == "aborted"


# --- filters of the user's own


@pytest.mark.parametrize(
    ("body", "kept"),
    [
        ("return len(x.rollouts) == 2", True),
        ("return max(x.rewards) > 2", False),
        ("import numpy; return numpy.mean(x.rewards) > 0.25", True),
        ("import numpy; return numpy.mean(x.rewards) > 0.75", False),
    ],
)
def test_a_filter_of_the_users_own_returns_a_bool(tmp_path: Path, body: str, kept: bool) -> None:
    assert keeps(user_code(tmp_path, body), group_of(*MIXED)) is kept


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return x.no_such", ["raised AttributeError", "no_such"]),
        ("return None", ["returned None", "True", "False"]),
        ("return 1", ["returned 1"]),
        ("return 'keep'", ["returned 'keep'"]),
    ],
)
def test_what_it_must_not_do_fails_the_run_and_names_it(
    tmp_path: Path, body: str, words: list[str]
) -> None:
    name = user_code(tmp_path, body)
    with pytest.raises(RunFailed) as caught:
        keeps(name, group_of(*MIXED))
    for word in ["buffer.filters", name, *words]:
        assert word in str(caught.value)


def test_what_cannot_be_a_filter_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text("LIMIT = 3\ndef two(group, args): ...\n")
    for attribute, word in [("LIMIT", "not a function"), ("two", "one argument"), ("x", "'x'")]:
        with pytest.raises(ConfigError, match=r"buffer\.filters: .*own\.py") as caught:
            load_filters(BufferConfig(batch_groups=1, filters=(f"{file}:{attribute}",)))
        assert word in str(caught.value)
