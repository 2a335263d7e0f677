from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.samples import group_of, sample, user_code

from ratchet.actors.entry import Entry
from ratchet.actors.filters import mask_aborted
from ratchet.actors.verdicts import KEEP, Verdict, Verdicts
from ratchet.config import BufferConfig
from ratchet.errors import ConfigError, RunFailed
from ratchet.types import Prompt, RolloutGroup

MIXED = group_of(sample(0.0), sample(1.0))
PARTLY_ABORTED = group_of(sample(0.0), sample(1.0), sample(0.5, finish="abort"))
ALL_ABORTED = group_of(sample(finish="abort"), sample(finish="abort", length=0))


def verdicts(unused: str = "drop", max_retries: int = 1, **buffer: Any) -> Verdicts:
    config = {"batch_groups": 1, "max_staleness": 2, "unused": unused, "max_retries": max_retries}
    return Verdicts(BufferConfig(**config | buffer))


def entry(group: RolloutGroup | None = None, retries: int = 0) -> Entry:
    found = Entry(0, 0, Prompt("p0", "0>"), retries=retries, group=group)
    found.versions = () if group is None else group.versions
    return found


# --- at finish


@pytest.mark.parametrize("unused", ["drop", "retry", "mask"])
def test_a_whole_group_is_kept_whatever_the_handler(unused: str) -> None:
    assert verdicts(unused).at_finish(entry(MIXED)) == KEEP


@pytest.mark.parametrize(
    ("unused", "some", "all_"),
    [("drop", "drop", "drop"), ("retry", "retry", "retry"), ("mask", "mask", "drop")],
)
def test_an_aborted_group_goes_to_the_handler(unused: str, some: Any, all_: Any) -> None:
    judge = verdicts(unused)
    assert judge.at_finish(entry(PARTLY_ABORTED)) == Verdict(some, "aborted")
    assert judge.at_finish(entry(ALL_ABORTED)) == Verdict(all_, "aborted")
    failed = group_of(sample(1.0), sample(finish="error"))
    assert judge.at_finish(entry(failed)) == Verdict(some, "generation")


def test_the_first_filter_that_rejects_names_the_reason_and_nothing_is_retried() -> None:
    filters = {"filters": ("truncated", "zero_spread")}
    judge = verdicts("retry", max_retries=9, **filters)
    group = group_of(sample(1.0, finish="length"), sample(1.0))
    assert judge.at_finish(entry(group)) == Verdict("drop", "filter:truncated")
    group = group_of(sample(1.0), sample(1.0))
    assert judge.at_finish(entry(group)) == Verdict("drop", "filter:zero_spread")
    assert judge.at_finish(entry(MIXED)) == KEEP


def test_aborted_comes_before_filtered() -> None:
    group = group_of(sample(1.0), sample(1.0), sample(0.0, finish="abort"))
    filters = {"filters": ("zero_spread", "any_aborted")}
    for unused in ("drop", "retry"):
        assert verdicts(unused, **filters).at_finish(entry(group)) == Verdict(unused, "aborted")
    # masked, the aborted reward is none: what is left has no spread
    assert verdicts("mask", **filters).at_finish(entry(group)).reason == "filter:zero_spread"
    judged = verdicts("mask", filters=("any_aborted",)).at_finish(entry(PARTLY_ABORTED))
    assert judged == Verdict("drop", "filter:any_aborted")


def test_a_filter_of_the_users_own_sees_a_group_that_is_masked_already(tmp_path: Path) -> None:
    name = user_code(tmp_path, "return [sum(r.loss_mask.data) for r in x.rollouts] != [2, 2, 0]")
    judged = verdicts("mask", filters=(name,)).at_finish(entry(PARTLY_ABORTED))
    assert judged == Verdict("drop", f"filter:{name}")


# --- failures, and what the trainer rejects


@pytest.mark.parametrize("unused", ["drop", "retry", "mask"])
@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_failure_is_retried_within_the_budget_and_never_trained(
    unused: str, retries: int
) -> None:
    judge = verdicts(unused, max_retries=2)
    action: Any = "retry" if unused == "retry" and retries < 2 else "drop"
    judged = judge.at_failure(entry(retries=retries), "reward", "it raised")
    assert judged == Verdict(action, "reward")
    rejected = entry(MIXED, retries)
    assert judge.at_step(rejected, "non_finite") == Verdict(action, "non_finite")
    assert judge.at_step(rejected, "stale") == Verdict(action, "stale")


def test_what_the_batch_filter_rejects_never_meets_the_handler() -> None:
    judged = verdicts("retry").at_step(entry(MIXED), "filter:batch")
    assert judged == Verdict("drop", "filter:batch")


def test_no_retries_are_left_when_there_are_none() -> None:
    judged = verdicts("retry", max_retries=0).at_failure(entry(), "timeout", "")
    assert judged == Verdict("drop", "timeout")


# --- at get: the bound is 2, and a token of version v is v steps stale


def ages(group: RolloutGroup) -> dict[int, int]:
    return {version: version for version in group.versions}


@pytest.mark.parametrize(
    ("unused", "actions"),
    [
        ("drop", ["keep", "drop", "drop"]),
        ("retry", ["keep", "retry", "retry"]),
        ("mask", ["keep", "mask", "drop"]),
    ],
)
def test_the_oldest_token_decides_and_a_mask_needs_one_that_is_fresh(
    unused: str, actions: list[str]
) -> None:
    fresh = group_of(sample(0.0, 0, 2), sample(1.0, 1))
    mixed = group_of(sample(0.0, 3, 3), sample(1.0, 3, 2))
    old = group_of(sample(0.0, 3), sample(1.0, 4, 3))
    found = [verdicts(unused).at_get(entry(group), ages(group)) for group in (fresh, mixed, old)]
    assert [verdict.action for verdict in found] == actions
    assert [verdict.reason for verdict in found] == ["", "stale", "stale"]


def test_a_token_that_the_loss_mask_leaves_out_is_not_left() -> None:
    group = group_of(sample(0.0, 1, finish="abort"), sample(1.0, 3))
    assert verdicts("mask").at_get(entry(group), ages(group)).action == "mask"
    group = mask_aborted(group)
    assert verdicts("mask").at_get(entry(group), ages(group)) == Verdict("drop", "stale")


# --- a handler of the user's own


@pytest.mark.parametrize("answer", ["drop", "retry", "mask"])
def test_its_answer_is_the_verdict(tmp_path: Path, answer: str) -> None:
    judge = verdicts(user_code(tmp_path, f"return {answer!r}"))
    assert judge.at_finish(entry(PARTLY_ABORTED)) == Verdict(answer, "aborted")  # type: ignore[arg-type]


def test_it_is_bounded(tmp_path: Path) -> None:
    judge = verdicts(user_code(tmp_path, "return 'retry'"), max_retries=3)
    found = [judge.at_failure(entry(retries=n), "reward", "").action for n in range(5)]
    assert found == ["retry"] * 3 + ["drop"] * 2
    judge = verdicts(user_code(tmp_path, "return 'mask'"))
    assert judge.at_failure(entry(), "reward", "") == Verdict("drop", "reward")
    assert judge.at_step(entry(MIXED), "stale") == Verdict("drop", "stale")


def test_it_is_told_what_there_is_to_know(tmp_path: Path) -> None:
    body = """
    if x.group is None:
        assert (x.reason, x.detail, x.staleness) == ("reward", "why", None)
        return "retry" if x.prompt.prompt_id == "p0" and x.retries == 1 else "drop"
    assert (x.reason, x.detail, len(x.group.rollouts)) == ("stale", "", 2)
    return "mask" if x.staleness == 3 else "drop"
    """
    judge = verdicts(user_code(tmp_path, body.strip()), max_retries=5)
    actions = [judge.at_failure(entry(retries=n), "reward", "why").action for n in range(3)]
    assert actions == ["drop", "retry", "drop"]
    for oldest, action in ((3, "mask"), (4, "drop")):
        group = group_of(sample(0.0, oldest, 2), sample(1.0, 2))
        assert judge.at_get(entry(group), ages(group)).action == action


def test_it_is_asked_again_only_when_nothing_is_left(tmp_path: Path) -> None:
    name = user_code(tmp_path, "CALLS.append(x); return 'mask' if len(CALLS) < 2 else 'retry'")
    file = Path(name.rpartition(":")[0])
    file.write_text(f"CALLS = []\n{file.read_text()}")
    judge = verdicts(name)
    waiting = entry(group_of(sample(0.0, 3, 2), sample(1.0, 3)))
    assert judge.at_get(waiting, {2: 2, 3: 3}) == Verdict("mask", "stale")
    waiting.masked = "stale"
    assert judge.at_get(waiting, {2: 2, 3: 4}) == Verdict("mask", "stale")
    assert judge.at_get(waiting, {2: 3, 3: 4}) == Verdict("retry", "stale")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return 'keep'", ["returned 'keep'", '"drop" | "retry" | "mask"']),
        ("return None", ["returned None"]),
        ("return ['drop']", ["returned ['drop']"]),
        ("raise KeyError('lost')", ["raised KeyError: 'lost'"]),
    ],
)
def test_what_it_must_not_do_fails_the_run_and_names_it(
    tmp_path: Path, body: str, words: list[str]
) -> None:
    name = user_code(tmp_path, body)
    with pytest.raises(RunFailed) as caught:
        verdicts(name).at_failure(entry(), "reward", "")
    for word in ["buffer.unused", name, *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("reference", "word"),
    [
        ("no_such_module_:own", "no module 'no_such_module_'"),
        ("ratchet.types:NotThere", "has no 'NotThere'"),
        ("ratchet.actors.filters:load_function", "one argument, (unused: UnusedGroup)"),
    ],
)
def test_what_cannot_be_a_handler_is_refused_when_it_is_loaded(reference: str, word: str) -> None:
    with pytest.raises(ConfigError, match=r"buffer\.unused: ") as caught:
        verdicts(reference)
    assert reference in str(caught.value)
    assert word in str(caught.value)
