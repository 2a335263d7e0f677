from __future__ import annotations

import json
import math
import statistics

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.stats import BufferStats, Distribution, Population, Tally, merged, rounded

values = st.lists(
    st.one_of(st.integers(0, 40_000), st.floats(-1e6, 1e6, allow_subnormal=False)), max_size=60
)


def of(*numbers: float) -> Distribution:
    tally = Tally()
    tally.add(numbers)
    return tally.read()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(values, max_size=5))
def test_parts_put_together_are_the_whole(parts: list[list[float]]) -> None:
    whole = [value for part in parts for value in part]
    grown = Tally()
    for part in parts:
        grown.add(part)
    for found in (grown.read(), merged(of(*part) for part in parts)):
        assert found.count == len(whole)
        if not whole:
            assert found == Distribution()
            continue
        scale = max(1.0, *map(abs, whole))
        assert found.mean == pytest.approx(statistics.fmean(whole), abs=1e-9 * scale)
        assert found.std == pytest.approx(statistics.pstdev(whole), rel=1e-6, abs=1e-6 * scale)
        assert (found.low, found.high) == (min(whole), max(whole))
        assert sum(found.histogram.values()) == len(whole)
        for share in (0.01, 0.1, 0.5, 0.9, 0.99, 1.0):
            exact = sorted(whole)[max(0, math.ceil(share * len(whole) - 1e-9) - 1)]
            assert found.quantile(share) == pytest.approx(exact, rel=0.051, abs=1e-6)


def test_whole_numbers_below_a_hundred_are_exact() -> None:
    found = of(*range(100))
    assert [found.quantile(share) for share in (0.01, 0.5, 0.99, 1.0)] == [0, 49, 98, 99]
    assert len(found.histogram) == 100


def test_it_is_bounded_whatever_comes() -> None:
    tally = Tally()
    for exponent in range(-300, 300):
        for digits in range(10, 100):
            tally.count(digits * 10.0**exponent)
            tally.count(-digits * 10.0**exponent)
    assert len(tally.read().histogram) <= 2 * 90 * 18 + 3
    tally.add((1e300, -1e308))  # too large to square: no number, but no error either
    assert math.isinf(tally.read().std)
    assert rounded(1e300) == 1e12
    assert rounded(-1e-7) == 0.0


def test_a_value_counts_as_often_as_it_is_said() -> None:
    tally = Tally()
    tally.count(3.0, 4)
    tally.count(7.0)
    tally.count(9.0, 0)
    found, expected = tally.read(), of(3, 3, 3, 3, 7)
    assert found.squares == pytest.approx(expected.squares)
    assert msgspec.structs.replace(found, squares=expected.squares) == expected


def test_a_summary_is_json_and_gives_the_distribution_back() -> None:
    found = of(0.0, 0.25, 1.0, 1234.0)
    summary = json.loads(json.dumps(found.summary()))
    assert summary["histogram"] == {"0": 1, "0.25": 1, "1": 1, "1200": 1}
    assert (summary["p50"], summary["p99"], summary["max"]) == (0.25, 1200.0, 1234.0)
    back = Distribution.of_summary(summary)
    assert back.std == pytest.approx(found.std)
    assert msgspec.structs.replace(back, squares=found.squares) == found


def test_the_summary_of_nothing_has_nulls_for_zeros() -> None:
    summary = Distribution().summary()
    assert (summary["count"], summary["histogram"]) == (0, {})
    numbers = [value for key, value in summary.items() if key not in {"count", "histogram"}]
    assert numbers == [None] * 8
    assert Distribution.of_summary(summary) == Distribution()
    with pytest.raises(ValueError, match="nothing has no quantiles"):
        Distribution().quantile(0.5)


def test_it_travels() -> None:
    population = Population(2, of(3, 400), of(0.5), {"a": of(1)})
    stats = BufferStats(offered=population, claim_to_finish_s=of(0.1, 7), dropped={"stale": 1})
    packed = msgspec.msgpack.encode(stats)
    assert msgspec.msgpack.decode(packed, type=BufferStats) == stats
