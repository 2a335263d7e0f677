"""What must hold of the files of a run, whatever became of its processes meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from pathlib import Path

from ratchet.storage.ledger import read_groups
from ratchet.storage.versions import read_versions

_TRAINED = frozenset(("trained", "committed"))
_ENDS = _TRAINED | {"dropped"}


def versions_go_forward(path: Path, *, terms: Set[int], last_step: int | None = None) -> None:
    """Check that no number is missing or given twice, and that terms only rise."""
    versions = list(read_versions(path))
    assert [v.version for v in versions] == list(range(len(versions)))
    assert [v.term for v in versions] == sorted(v.term for v in versions)
    assert last_step is None or versions[-1].step == last_step
    assert {v.term for v in versions} == terms


def each_prompt_counts_once(
    path: Path, *, batch_groups: int, num_prompts: int, num_steps: int | None = None
) -> None:
    """Check that each step has its batch, and that a prompt ends once an epoch, none left out.

    Args:
        path: of the ledger.
        batch_groups: groups of a step.
        num_prompts: prompts of an epoch.
        num_steps: how many there are; by default as many as the ledger knows.
    """
    groups = list(read_groups(path))
    trained = Counter(group.trained_step or 0 for group in groups if group.state in _TRAINED)
    assert trained == dict.fromkeys(range(1, (num_steps or max(trained)) + 1), batch_groups), (
        trained
    )
    ends = Counter((group.epoch, group.prompt_id) for group in groups if group.state in _ENDS)
    assert set(ends.values()) == {1}, ends.most_common(3)
    still_open = {group.epoch for group in groups if group.state not in _ENDS}
    whole = {group.epoch for group in groups} - {max(group.epoch for group in groups)} - still_open
    for epoch in whole:
        assert sum(1 for of, _ in ends if of == epoch) == num_prompts
