"""What became of every message, made of the files in which processes noted what they did."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

Flow = tuple[str, int, str, str]
"""sender, its life, receiver, lane"""


@dataclass
class Verdict:
    """What became of every message, and what should not have."""

    given: int = 0
    heard: int = 0
    acknowledged: int = 0
    dead: int = 0
    both: int = 0
    """dead letters that were heard all the same: not known to be delivered"""
    with_the_killed: int = 0
    """given by a process that was killed before it could send them, or learn that they were lost"""
    problems: list[str] = field(default_factory=list)


def lines(directory: Path, kind: str) -> dict[tuple[str, int], list[list[str]]]:
    """What was noted, by process and life."""
    found = {}
    for path in directory.glob(f"*.{kind}"):
        name, life, _ = path.name.split(".")
        found[name, int(life)] = [line.split() for line in path.read_text().splitlines()]
    return found


def by_flow(directory: Path, kind: str) -> dict[Flow, set[int]]:
    """What senders noted."""
    found: dict[Flow, set[int]] = defaultdict(set)
    for (sender, life), noted in lines(directory, kind).items():
        for receiver, lane, number in noted:
            found[sender, life, receiver, lane].add(int(number))
    return found


def judge(directory: Path, killed: set[tuple[str, int]]) -> Verdict:
    """Account for every message that was given."""
    verdict = Verdict()
    given, acked, dead = (by_flow(directory, kind) for kind in ("gave", "acked", "dead"))
    heard: dict[Flow, set[int]] = defaultdict(set)
    for (receiver, its_life), noted in lines(directory, "heard").items():
        in_turn: dict[Flow, list[int]] = defaultdict(list)
        for sender, life, lane, number in noted:
            in_turn[sender, int(life), receiver, lane].append(int(number))
        for flow, numbers in in_turn.items():
            where = f"{flow} in life {its_life}"
            if len(set(numbers)) < len(numbers) or heard[flow] & set(numbers):
                verdict.problems.append(f"doubled: {where}")
            if numbers != sorted(numbers):
                verdict.problems.append(f"out of order: {where}")
            gap = set(range(min(numbers), max(numbers))) - set(numbers) - dead[flow]
            if gap:
                verdict.problems.append(f"a gap: {where}: {sorted(gap)[:5]}")
            heard[flow] |= set(numbers)
    for flow in given | heard | acked | dead:
        left = given[flow] - heard[flow] - dead[flow]
        if acked[flow] - heard[flow]:
            verdict.problems.append(f"acknowledged and lost: {flow}")
        if (heard[flow] | acked[flow] | dead[flow]) - given[flow]:
            verdict.problems.append(f"never given: {flow}")
        if left and flow[:2] not in killed:
            verdict.problems.append(f"lost without a word: {flow}: {sorted(left)[:5]}")
        verdict.with_the_killed += len(left)
        verdict.both += len(heard[flow] & dead[flow])
    verdict.given, verdict.heard, verdict.acknowledged, verdict.dead = (
        sum(map(len, each.values())) for each in (given, heard, acked, dead)
    )
    return verdict
