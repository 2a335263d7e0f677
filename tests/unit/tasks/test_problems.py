from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet.errors import TaskError
from ratchet.tasks.problems import TaskSummary, check_task, fingerprint, problem_id, split_by_text
from ratchet.types import Prompt


def make(texts: list[str]) -> list[Prompt]:
    return [Prompt(prompt_id=str(number), text=text) for number, text in enumerate(texts)]


class Given:
    """A task of given prompts."""

    def __init__(self, train: list[object], held_out: list[object]) -> None:
        self.splits = {"train": train, "eval": held_out}

    def prompts(self, split: str) -> list[object]:
        return self.splits[split]

    def score(self, prompt: Prompt, completion: str) -> float:
        raise NotImplementedError


def test_the_id_of_a_problem_never_changes() -> None:
    # written down: a data cursor or a ledger on disk holds these
    assert problem_id("1234>") == "c93e29cd19a2a0ca"
    assert problem_id("12+34=") == "bbf8be5f94c9d972"


@settings(max_examples=60)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=20), st.integers(0, 10))
def test_a_count_holds_out_so_many_problems_and_keeps_the_order(data: list[int], k: int) -> None:
    texts = [str(value) for value in data]
    prompts = make(texts)
    distinct = set(texts)
    if k >= len(distinct):
        with pytest.raises(TaskError, match=f"{len(distinct)} distinct problems"):
            split_by_text(prompts, k)
        return
    splits = split_by_text(prompts, k)
    held_out = {prompt.text for prompt in splits.eval}
    assert len(held_out) == k
    assert held_out.isdisjoint(prompt.text for prompt in splits.train)
    assert [p for p in prompts if p.text not in held_out] == list(splits.train)
    assert [p for p in prompts if p.text in held_out] == list(splits.eval)
    # no order of the data, and nothing but the text, decides
    assert {p.text for p in split_by_text(prompts[::-1], k).eval} == held_out


def test_a_share_decides_each_problem_by_itself() -> None:
    prompts = make([f"problem {number}" for number in range(4000)])
    every = split_by_text(prompts, 0.25)
    half = split_by_text(prompts[:2000], 0.25)
    assert {p.text for p in half.eval} == {p.text for p in every.eval if int(p.prompt_id) < 2000}
    assert 900 < len(every.eval) < 1100


def test_the_summary_counts_problems_not_prompts() -> None:
    train = make(["a", "b", "a"])
    summary = check_task(Given([*train], [Prompt(prompt_id="x", text="c")]))
    assert summary == TaskSummary(3, 1, num_problems=3, fingerprint=fingerprint(train))


def test_the_fingerprint_is_of_ids_texts_references_and_their_order() -> None:
    prompts = [Prompt("1", "a", "x"), Prompt("2", "b")]
    known = fingerprint(prompts)
    assert known == "9fa5708b75127b6d31f4984efa2c4a15"  # run directories hold it
    others = [
        prompts[::-1],
        prompts[:1],
        [Prompt("1", "a", "y"), prompts[1]],
        [Prompt("1", "ax", ""), prompts[1]],
        [Prompt("1", "a", "x"), Prompt("3", "b")],
        [Prompt("1", "a", "x"), Prompt("2", "c")],
        [Prompt("1", "a", None), Prompt("2", "b")],
    ]
    assert len({known, *map(fingerprint, others)}) == len(others) + 1
    assert fingerprint([Prompt("1", "a", "x", {"seen": 1}), prompts[1]]) == known


@pytest.mark.parametrize(
    ("train", "held_out", "words"),
    [
        ([], [Prompt(prompt_id="1", text="a")], "no prompts to train on"),
        (["a"], [], "must be ratchet.types.Prompt, got 'a'"),
        (make(["a"]), make(["b"]), "the prompt id '0' is used twice, for 'a' and 'b'"),
        (make(["a"]), [Prompt(prompt_id="1", text="a")], "the problem 'a' is in both splits"),
    ],
)
def test_a_task_that_breaks_its_promise_is_refused(
    train: list[object], held_out: list[object], words: str
) -> None:
    with pytest.raises(TaskError, match=words):
        check_task(Given(train, held_out))
