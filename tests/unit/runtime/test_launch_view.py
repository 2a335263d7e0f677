"""A launcher shows its own role, also where several share a directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ratchet.observability.lines import LogLine
from ratchet.runtime.launch_view import LaunchView

if TYPE_CHECKING:
    import pytest


def line(source: str, level: str, event: str) -> LogLine:
    fields = {"level": level, "event": event, "role": source}
    return LogLine(source, "2026-01-01T00:00:00.000Z", fields, "")


def shown(name: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    view = LaunchView(name, 9)
    view.on_step({"step": 4})
    for source in ("rollout-1", "rollout-2", "trainer-0", "buffer-0"):
        for level in ("info", "warning", "error"):
            view.on_event(line(source, level, f"{source}/{level}"))
            launcher = "launcher-" + source.removesuffix("-0" if source == "buffer-0" else "")
            view.on_event(line(launcher, level, f"{launcher}/{level}"))
    view.on_event(LogLine("rollout-1", "", None, "not json"))
    view.close()
    out, err = capsys.readouterr()
    return [text.split()[-1] for text in err.splitlines()] + out.split()[:2]


def test_errors_of_the_role_and_warnings_of_its_launcher(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert shown("rollout-1", capsys) == [
        "launcher-rollout-1/warning",
        "rollout-1/error",
        "launcher-rollout-1/error",
    ]
    assert shown("buffer", capsys) == [
        "launcher-buffer/warning",
        "buffer-0/error",
        "launcher-buffer/error",
    ]


def test_steps_are_the_trainers(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown("trainer-0", capsys)[-2:] == ["step", "4/9"]
