"""What must be the same on every node of a run, and how a difference is told."""

from __future__ import annotations

import pytest
from tests.helpers.config import small_config

from ratchet.errors import ConfigError
from ratchet.runtime.agreement import check_same, differences

CONFIG = small_config()


def test_what_is_local_to_a_node_may_differ() -> None:
    other = small_config(runtime={"threads": 8, "host": "127.0.0.9"})
    other = other.model_copy(update={"name": "as-it-is-called-here"})
    check_same(CONFIG, other.to_toml(), whose="the registry")


def test_each_difference_is_named_with_both_values() -> None:
    other = small_config(
        trainer={"num_steps": 7}, buffer={"batch_groups": 8}, eval={"num_prompts": 2}
    )
    with pytest.raises(ConfigError) as caught:
        check_same(CONFIG, other.to_toml(), whose="the run at tcp:10.0.0.1:7000")
    lines = str(caught.value).splitlines()
    assert "not that of the run at tcp:10.0.0.1:7000" in lines[0]
    assert [line.strip() for line in lines[1:]] == [
        "buffer.batch_groups is 4 here and 8 there",
        "eval.num_prompts is 0 here and 2 there",
        "trainer.num_steps is 3 here and 7 there",
    ]


def test_a_field_that_only_one_of_them_has_is_a_difference() -> None:
    theirs = CONFIG.to_toml() + "\n[algorithm2]\nnew = 1\n"  # of another version of Ratchet
    assert list(differences(CONFIG.to_toml(), theirs)) == [("algorithm2.new", "(not set)", "1")]
    assert list(differences(theirs, CONFIG.to_toml())) == [("algorithm2.new", "1", "(not set)")]


def test_a_fingerprint_is_compared_where_both_have_one() -> None:
    def pinned(fingerprint: str) -> str:
        task = CONFIG.task.model_copy(update={"fingerprint": fingerprint})
        return CONFIG.model_copy(update={"task": task}).to_toml()

    assert not list(differences(CONFIG.to_toml(), pinned("a1")))
    assert not list(differences(pinned("a1"), pinned("")))
    assert list(differences(pinned("a1"), pinned("b2"))) == [("task.fingerprint", "'a1'", "'b2'")]
