from __future__ import annotations

import pytest

from ratchet.errors import RewardFailed, TaskError
from ratchet.tasks import answers
from ratchet.tasks.answers import exact, find_score
from ratchet.tasks.math_score import score
from ratchet.types import Prompt


def test_scores_are_known_by_name() -> None:
    assert find_score("exact") is exact
    assert find_score("math") is score


def test_exact_is_the_text_without_white_space_around_it() -> None:
    prompt = Prompt("p", "?", " 4 ")
    assert [exact(prompt, text) for text in ("4", "\n4 ", "4.0", "")] == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(RewardFailed, match="'p' has no answer"):
        exact(Prompt("p", "?"), "4")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"not installed; pip install 'ratchet-rl\[math\]'"):
        find_score("math")
