"""The view of a run while it goes on: a panel on a terminal, one plain line a step in a pipe.

Consumes metrics.jsonl and the logs of a run directory, produces text for people. `Viewer.follow`
looks for news four times a second until `stop`, then once more, so that the last step is shown. It
reads files only: it cannot disturb the run, and works on the run of another process.
"""

from __future__ import annotations

import threading
import time
import tomllib
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ratchet.observability.follow import LogDirectory
from ratchet.observability.lines import LineFilter, LogLine, printable, show
from ratchet.observability.metrics import MetricsReader
from ratchet.observability.rundir import RunDirectory

REFRESH_S: Final = 0.25
_HOLD_S: Final = 0.25
_ALARM: Final = LineFilter(level="warning")
_ERROR: Final = LineFilter(level="error")
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
_ASCII: Final = "_.-=+*#@"


class RunView(Protocol):
    """Something that shows a run to people."""

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """A step was taken; see `ratchet.actors.step_metrics` for its fields."""

    def on_event(self, line: LogLine) -> None:
        """A line was logged, at any level."""

    def draw(self) -> None:
        """All news is told: show it."""

    def close(self) -> None:
        """Leave the terminal as it was; nothing comes after it."""


def open_view(root: Path, console: Console | None = None) -> Viewer:
    """Return a viewer of the run in a directory, fit for where its output goes."""
    console = console if console is not None else Console()
    name, num_steps = _plan(root)
    view: RunView
    if console.is_terminal and not console.is_dumb_terminal:
        view = PanelView(console, name, num_steps)
    else:
        view = PlainView(console, Console(stderr=True), num_steps)
    return Viewer(root, view)


class Viewer:
    """Follows the files of a run and tells a view. `follow` is for a thread of its own: an output
    that nobody reads holds that up, and not the loop that supervises the run.
    """

    def __init__(self, root: Path, view: RunView) -> None:
        self._view = view
        self._metrics = MetricsReader(RunDirectory(root).metrics)
        self._logs = LogDirectory(RunDirectory(root).logs)
        self._stop = threading.Event()

    def skip(self) -> None:
        """Show nothing of what is there already."""
        self._metrics.new()
        for _ in self._logs.present():
            pass

    def follow(self) -> None:
        """Show the run until `stop`."""
        try:
            while not self._stop.is_set():
                self._look(_HOLD_S)
                self._stop.wait(REFRESH_S)
            self._look(0.0)
        finally:
            self._logs.close()
            self._view.close()

    def stop(self) -> None:
        """The run has ended: show what is left, and let `follow` return."""
        self._stop.set()

    def _look(self, hold_s: float) -> None:
        for line in self._logs.new(time.monotonic(), hold_s):
            self._view.on_event(line)
        for metrics in self._metrics.new():
            self._view.on_step(metrics)
        self._view.draw()


class PlainView:
    """One line a step on standard output, errors on standard error."""

    def __init__(self, console: Console, errors: Console, num_steps: int | None) -> None:
        self._console = console
        self._errors = errors
        self._of = f"/{num_steps}" if num_steps else ""

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """Print it."""
        m = _Numbers(metrics)
        text = (
            f"step {m.count('step')}{self._of}  reward {_rewards(metrics)}"
            f"  staleness {m.real('buffer/staleness_mean', 1)}"
            f" (max {m.count('buffer/staleness_max')})"
            f"  queue {m.count('buffer/queue_groups')}  {m.count('tokens_per_s')} tokens/s"
            f"  version {m.count('version')}  idle: trainer {m.idle('trainer_busy_share')},"
            f" engines {m.idle('rollout_busy_share')}"
        )
        self._print(self._console, text + ("" if metrics.get("applied", True) else "  SKIPPED"))

    def on_event(self, line: LogLine) -> None:
        """Print errors."""
        if line.level is not None and _ERROR.matches(line):
            self._print(self._errors, show(line))

    def draw(self) -> None:
        """Each line is out already."""

    def close(self) -> None:
        """Nothing is left open."""

    @staticmethod
    def _print(console: Console, text: str) -> None:
        # one line a step whatever the width, and at once
        console.print(text, soft_wrap=True, markup=False, highlight=False)
        console.file.flush()


class PanelView:
    """A panel that is drawn again and again in place."""

    def __init__(self, console: Console, name: str, num_steps: int | None) -> None:
        self._name = name
        self._num_steps = num_steps
        self._last: Mapping[str, Any] = {}
        self._rewards: deque[float] = deque(maxlen=48)
        self._dropped: Counter[str] = Counter()
        self._alarms: deque[LogLine] = deque(maxlen=5)
        self._newest = "starting"
        self._blocks = _ASCII if console.options.ascii_only else _BLOCKS
        # drawn from this thread only: one of Live's own would see the deques while they change
        self._live = Live(console=console, get_renderable=self.render, auto_refresh=False)
        self._live.start()

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        """Keep it for the next drawing."""
        self._last = metrics
        reward = metrics.get("reward_mean")
        if isinstance(reward, int | float):
            self._rewards.append(float(reward))
        self._dropped.update(metrics.get("buffer/dropped") or {})

    def on_event(self, line: LogLine) -> None:
        """Keep it for the next drawing."""
        if line.level is None:
            return
        self._newest = f"{line.role}: {line.event}"
        if _ALARM.matches(line):
            self._alarms.append(line)

    def draw(self) -> None:
        """Draw the panel in the place of the last one."""
        self._live.refresh()

    def close(self) -> None:
        """Leave the last panel on the terminal."""
        self._live.stop()

    def render(self) -> RenderableType:
        """Return the panel as it is now."""
        parts: list[RenderableType] = [self._progress(), self._numbers()]
        if self._alarms:
            parts.append(Text("\nlast warnings and errors", style="bold"))
        for line in self._alarms:
            style = "red" if _ERROR.matches(line) else "yellow"
            first = show(line).partition("\n")[0]
            parts.append(Text(first, style=style, no_wrap=True, overflow="ellipsis"))
        return Panel(Group(*parts), title=Text(f"ratchet: {printable(self._name)}"))

    def _progress(self) -> RenderableType:
        m = _Numbers(self._last)
        if not self._last:
            return Text(
                f"no step yet; {printable(self._newest)}", no_wrap=True, overflow="ellipsis"
            )
        line = Table.grid(expand=True, padding=(0, 1))
        of = f"/{self._num_steps}" if self._num_steps else ""
        cells: list[RenderableType] = [Text(f"step {m.count('step')}{of}", style="bold")]
        if self._num_steps:
            cells.append(ProgressBar(total=self._num_steps, completed=self._last.get("step", 0)))
        line.add_row(*cells, Text(f"{m.real('time_s', 0)} s", justify="right"))
        return line

    def _numbers(self) -> RenderableType:
        m = _Numbers(self._last)
        dropped = ", ".join(f"{printable(why)} {n}" for why, n in sorted(self._dropped.items()))
        rows = (
            ("reward", f"{_rewards(self._last)}  {sparkline(self._rewards, self._blocks)}"),
            (
                "staleness",
                f"mean {m.real('buffer/staleness_mean', 2)}, max {m.count('buffer/staleness_max')}",
            ),
            (
                "queue",
                f"{m.count('buffer/queue_groups')}, in flight {m.count('buffer/in_flight_groups')}",
            ),
            ("tokens/s", m.count("tokens_per_s")),
            ("version", m.count("version")),
            (
                "idle",
                f"trainer {m.idle('trainer_busy_share')}, engines {m.idle('rollout_busy_share')}",
            ),
            (
                "a step",
                f"{m.real('step_s', 2)} s: waits {m.real('wait_s', 2)}, trains"
                f" {m.real('train_s', 2)}, held by a transfer {m.real('publish_s', 2)}",
            ),
            ("dropped", dropped or "none"),
        )
        table = Table.grid(padding=(0, 2))
        for name, value in rows:
            table.add_row(Text(name, style="dim"), Text(value))
        return table


def _rewards(metrics: Mapping[str, Any]) -> str:
    """Mean reward of what is trained, and of all that finished where drops make them differ."""
    mean = _Numbers(metrics).real("reward_mean")
    if not metrics.get("buffer/dropped"):
        return mean
    offered = _Numbers(metrics.get("buffer/offered/reward") or {})
    return f"{mean} (all {offered.real('mean')})"


def sparkline(values: deque[float] | list[float], blocks: str = _BLOCKS) -> str:
    """Return one character a value, from the lowest to the highest of them."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in values)


class _Numbers:
    """Texts of metrics, with a dash for what is not there."""

    def __init__(self, metrics: Mapping[str, Any]) -> None:
        self._metrics = metrics

    def real(self, name: str, digits: int = 3) -> str:
        value = self._metrics.get(name)
        return f"{value:.{digits}f}" if isinstance(value, int | float) else "-"

    def count(self, name: str) -> str:
        return self.real(name, 0)

    def idle(self, name: str) -> str:
        value = self._metrics.get(name)
        return f"{1 - value:.0%}" if isinstance(value, int | float) else "-"


def _plan(root: Path) -> tuple[str, int | None]:
    """Return the run's name and its number of steps, as far as its configuration tells."""
    try:
        config = tomllib.loads(RunDirectory(root).config.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a view of a directory that is no run yet has nothing to add
        return root.name, None
    num_steps = config.get("trainer", {}).get("num_steps")
    return str(config.get("name", root.name)), num_steps if isinstance(num_steps, int) else None
