"""A buffer's table on a file, which is killed and opened again, and settled with a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.actors import RecordingLog
from tests.helpers.training import make_groups

from ratchet.actors.entry import Entry
from ratchet.actors.group_table import GroupTable
from ratchet.actors.judging import Judging
from ratchet.actors.prompt_source import PromptSource
from ratchet.actors.recovery import Recovery
from ratchet.actors.stored_groups import StoredGroups
from ratchet.config import BufferConfig
from ratchet.messages import RequestBatch, StepTrained
from ratchet.staleness import Lineage
from ratchet.storage.ledger import GroupLedger
from ratchet.storage.payloads import Payloads
from ratchet.types import Prompt, RolloutGroup

GROUP = make_groups(1, 2)[0]
PROMPTS = [Prompt(f"p{i}", f"{i}>") for i in range(5)]


class Scene:
    """A buffer's table on a file, and a lineage in which the version is the step."""

    def __init__(
        self, path: Path, num_versions: int = 9, *, keep: bool = False, **buffer: Any
    ) -> None:
        self.path = path
        path.parent.mkdir(exist_ok=True)
        self.keep = keep
        self.buffer = BufferConfig(**{"batch_groups": 1} | buffer)
        self.lineage = Lineage()
        self.newest = num_versions - 1
        for version in range(num_versions):
            self.lineage.add(version, version, version - 1 if version else None)
        self.open()

    def open(self, prompts: list[Prompt] = PROMPTS) -> None:
        self.ledger = GroupLedger.open(self.path)
        source = PromptSource(prompts, seed=0)
        payloads = Payloads(self.path.parent / "payloads") if self.keep else None
        self.stored = StoredGroups(payloads, max_staleness=1)
        self.table = GroupTable(
            self.ledger,
            source,
            wall_time=lambda: 1.0,
            now=lambda: 1.0,
            max_reissues=3,
            stored=self.stored,
        )
        self.log = RecordingLog()
        self.judging = Judging(self.buffer, self.table, self.lineage, self.log)
        self.recovery = Recovery(self.table, self.lineage, self.judging.reject, self.log)

    def kill(self) -> None:
        """What was flushed is there; then another life begins."""
        self.table.flush()
        self.ledger.close()
        self.stored.close()
        self.open()

    def claim(self, number: int = 1) -> list[Entry]:
        return [self.table.claim(("w", "i"), until=9.0) for _ in range(number)]

    def finish(self, *entries: Entry) -> None:
        for entry in entries:
            group = RolloutGroup(
                entry.group_id, entry.attempt, entry.prompt.prompt_id, entry.epoch, GROUP.rollouts
            )
            self.table.finish(entry, group, (0,))
            self.stored.keep(entry, group)

    def batch(self, step: int, number: int = 1) -> list[int]:
        entries = self.claim(number)
        self.finish(*entries)
        self.table.batch(self.table.queued(), step)
        return [entry.group_id for entry in entries]

    def next_batch(self, step: int) -> list[int]:
        """One group, a stored one before all others."""
        if not self.table.stored:
            return self.batch(step)
        stored = self.table.waiting.next_stored()
        if stored is None:
            return self.batch(step)
        self.table.requeue(*stored, stored[1].versions)
        self.stored.keep(*stored)
        self.table.batch(self.table.queued(), step)
        return [stored[0].group_id]

    def train(self, step: int, number: int = 1) -> list[int]:
        ids = self.batch(step, number)
        self.table.train(ids, step, version=step - 1)
        return ids

    def request(self, term: int, version: int, done: StepTrained | None = None) -> RequestBatch:
        step = self.lineage.step(version)
        return RequestBatch("trainer-0", term, version, step, done)

    def requeued(self) -> list[tuple[int, int]]:
        """Queue all that is stored; return (group, attempt) of each."""
        found = []
        while (stored := self.table.waiting.next_stored()) is not None:
            entry, group = stored
            assert (entry.group_id, entry.attempt) == (group.group_id, group.attempt)
            assert group.rollouts == GROUP.rollouts
            self.table.requeue(entry, group, group.versions)
            self.stored.keep(entry, group)
            found.append((group.group_id, group.attempt))
        return found

    def state(self, *group_ids: int) -> list[tuple[str, int, str | None]]:
        rows = [self.ledger.group(group_id) for group_id in group_ids]
        return [(row.state, row.attempt, row.reason) for row in rows if row is not None]
