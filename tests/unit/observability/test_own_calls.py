from __future__ import annotations

import threading
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog

from ratchet.observability.own_calls import OwnCalls


class Log(RecordingLog):
    """Sets `told` once something has been said."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def warning(self, event: str, **fields: Any) -> None:
        super().warning(event, **fields)
        self.told.set()


def test_what_blocks_is_named_while_it_does_and_when_it_returns() -> None:
    log = Log()
    calls = OwnCalls(log, slow_s=0.02)
    with calls.watch("buffer.unused: mine:handle"):
        assert log.told.wait(60)  # it is not over, and somebody knows
        (blocks,) = log.named("own_code_blocks")[:1]
    calls.close()
    (returned,) = log.named("own_code_returned")
    assert {blocks["name"], returned["name"]} == {"buffer.unused: mine:handle"}
    assert returned["seconds"] >= blocks["seconds"] >= 0.0


def test_what_is_quick_is_not_named() -> None:
    log = Log()
    calls = OwnCalls(log, slow_s=3600.0)
    with calls.watch("quick"):
        pass
    with pytest.raises(KeyError), calls.watch("raises"):
        raise KeyError
    calls.close()
    assert log.events == []


def test_nothing_runs_where_nothing_is_watched() -> None:
    before = threading.active_count()
    OwnCalls(Log()).close()
    assert threading.active_count() == before
