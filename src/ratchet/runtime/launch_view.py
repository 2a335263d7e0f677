"""What a launcher shows of its role: lines of progress, and what went wrong.

Consumes the files of the node's directory, produces lines of text. Several roles may share the
directory: only what is of this one is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rich.console import Console

from ratchet.observability.lines import LineFilter, LogLine, show
from ratchet.observability.live import PlainView, Viewer
from ratchet.runtime.launch import Launch
from ratchet.runtime.role import log_stem

_WARNING: Final = LineFilter(level="warning")


def open_launch_view(launched: Launch) -> Viewer:
    """Return a viewer of one launched role."""
    view = LaunchView(launched.name, launched.config.trainer.num_steps)
    return Viewer(launched.directory.root, view)


class LaunchView(PlainView):
    """One line a step of a trainer; errors of the role; warnings too of its launcher, which tell of
    each restart.
    """

    def __init__(self, name: str, num_steps: int) -> None:
        self._err = Console(stderr=True)
        super().__init__(Console(), self._err, num_steps)
        self._trains = name.startswith("trainer")
        self._role = log_stem(name)
        self._launcher = f"launcher-{name}"

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """Print it, if it is ours."""
        if self._trains:
            super().on_step(metrics)

    def on_event(self, line: LogLine) -> None:
        """Print what concerns this role."""
        if line.source == self._role:
            super().on_event(line)
        elif line.source == self._launcher and line.level is not None and _WARNING.matches(line):
            self._print(self._err, show(line))
