"""The buffer has the calls of code of the user's own watched, each by the name of its field."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.helpers.actors import RecordingLog
from tests.helpers.config import small_config
from tests.helpers.driven_buffer import LIFE, DrivenBuffer, assignments
from tests.helpers.samples import sample

from ratchet.messages import ClaimPrompts, GroupFailed, GroupFinished, RequestBatch, RoleRegistered
from ratchet.observability.own_calls import OwnCalls
from ratchet.types import RolloutGroup, RolloutStats, VersionRecord

OWN = """
def keeps(group):
    return True

def handle(unused):
    return "drop"

class First:
    def put(self, group): ...
    def get(self, num_groups, finished): return list(finished)[:num_groups]
    def metrics(self): return {}
"""


class Calls(OwnCalls):
    def __init__(self) -> None:
        super().__init__(RecordingLog())
        self.names: list[str] = []
        self.is_closed = False

    @contextmanager
    def watch(self, name: str) -> Iterator[None]:
        self.names.append(name)
        yield

    def close(self) -> None:
        self.is_closed = True


def test_each_call_is_watched_until_the_buffer_ends(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN, encoding="utf-8")
    named = {"filters": [f"{own}:keeps"], "unused": f"{own}:handle", "custom": f"{own}:First"}
    loop, calls = asyncio.new_event_loop(), Calls()
    config = small_config(buffer={"batch_groups": 1} | named)
    buffer = DrivenBuffer(config, 4, loop, own_calls=calls)
    buffer.receive(RoleRegistered((), (VersionRecord(0, 1, 0, None, "live", "d"),)))
    buffer.receive(ClaimPrompts("w", "i", 2, 0, LIFE))
    first, second = (given for _, _, given in assignments(buffer.take_told()))
    stats = RolloutStats("w", "i")
    group = RolloutGroup(first.group_id, 0, first.prompt.prompt_id, 0, (sample(1.0),))
    buffer.receive(GroupFinished("w", "i", group, stats))
    buffer.receive(RequestBatch("trainer-0", 1, 0, 0, None, LIFE))
    buffer.receive(GroupFailed("w", "i", second.group_id, 0, "reward", "", stats))
    custom = f"buffer.custom = '{own}:First'"
    assert calls.names == [
        f"buffer.filters: {own}:keeps",
        *(f"{custom}: {method}()" for method in ("put", "get", "metrics")),
        f"buffer.unused: {own}:handle",
    ]
    buffer.release()
    assert calls.is_closed
    buffer.end()
    loop.close()
