"""What `buffer.custom` may name; what a policy may answer is in tests/contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config
from tests.helpers.samples import group_of, sample

from ratchet.actors.buffer_policy import Policy
from ratchet.errors import ConfigError


def load(custom: str | None, **buffer: Any) -> Policy:
    return Policy.load(small_config(buffer={"batch_groups": 2, "custom": custom, **buffer}).buffer)


def test_the_built_in_policy_is_first_in_first_out() -> None:
    policy = load(None)
    group = group_of(sample())
    policy.put(group)
    assert policy.get(2, {7: group, 3: group, 5: group}) == (7, 3)
    assert policy.metrics() == {}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("Mine = 3", "names a int; name a class"),
        ("class Other: ...", "has no 'Mine'"),
        ("class Mine:\n    def __init__(self, n): ...", "made without arguments, which raised"),
        ("class Mine:\n    def get(self, n, f): ...", r"has no put, metrics; it needs put, get"),
        ("raise OSError('gone')", "gone"),
    ],
)
def test_what_cannot_be_one_is_refused_by_name(tmp_path: Path, body: str, text: str) -> None:
    file = tmp_path / "policy.py"
    file.write_text(body)
    with pytest.raises(ConfigError, match=r"buffer\.custom") as caught:
        load(f"{file}:Mine")
    caught.match(text)


def test_it_does_not_go_with_a_bound_that_is_proved_of_another_order() -> None:
    with pytest.raises(ConfigError, match=r'a:b.*cannot go with admission = "bounded"'):
        load("a:b", admission="bounded")
