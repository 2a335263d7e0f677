import io
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ratchet.observability.lines import LogLine
from ratchet.observability.live import PanelView, PlainView, Viewer, open_view, sparkline

STEP: dict[str, Any] = {
    "step": 3,
    "version": 5,
    "time_s": 12.0,
    "applied": True,
    "reward_mean": 0.25,
    "buffer/offered/reward": {"mean": 0.75},
    "buffer/staleness_mean": 1.25,
    "buffer/staleness_max": 2,
    "buffer/queue_groups": 4,
    "buffer/in_flight_groups": 6,
    "buffer/dropped": {"stale": 1},
    "trainer_busy_share": 0.75,
    "rollout_busy_share": 0.9,
    "tokens_per_s": 812.4,
    "step_s": 1.0,
    "wait_s": 0.25,
    "train_s": 0.75,
    "publish_s": 0.0,
}


def event(level: str, name: str) -> LogLine:
    return LogLine("buffer-0", "", {"level": level, "event": name, "role": "buffer"}, "")


def terminal(width: int = 100, **options: Any) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, **options)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def pipe() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=40)


def test_plain_is_one_line_a_step_and_errors_apart() -> None:
    out, errors = pipe(), pipe()
    view = PlainView(out, errors, 300)
    view.on_event(event("warning", "lease_ended"))
    view.on_step(STEP)
    view.on_event(event("error", "actor_failed"))
    view.on_step({"step": 4, "applied": False, "reward_mean": None})
    view.draw()
    view.close()
    assert text(out).splitlines() == [
        "step 3/300  reward 0.250 (all 0.750)  staleness 1.2 (max 2)  queue 4  812 tokens/s"
        "  version 5"
        "  idle: trainer 25%, engines 10%",
        "step 4/300  reward -  staleness - (max -)  queue -  - tokens/s  version -"
        "  idle: trainer -, engines -  SKIPPED",
    ]
    assert text(errors).split() == ["ERROR", "buffer", "actor_failed"]


def drawn(view: PanelView, width: int = 100) -> str:
    console = terminal(width, color_system=None)
    console.print(view.render())
    return text(console)


def test_the_panel_shows_the_run() -> None:
    view = PanelView(terminal(), "sums", 300)
    view.on_event(event("info", "role_starting"))
    assert "no step yet; buffer: role_starting" in drawn(view)
    for reward in (0.0, 0.5, 0.25):
        view.on_step({**STEP, "reward_mean": reward})
    shown = drawn(view)
    for expected in (
        "ratchet: sums",
        "step 3/300",
        "0.250 (all 0.750)  ▁█▅",
        "mean 1.25, max 2",
        "4, in flight 6",
        "812",
        "trainer 25%, engines 10%",
        "1.00 s: waits 0.25, trains 0.75, held by a transfer 0.00",
        "stale 3",
    ):
        assert expected in shown
    view.close()


def test_the_panel_keeps_the_last_five_warnings_and_errors() -> None:
    view = PanelView(terminal(), "sums", None)
    for n in range(7):
        view.on_event(event("info", f"info_{n}"))
        view.on_event(event("warning" if n % 2 else "error", f"alarm_{n}"))
    view.on_event(LogLine("a-0", "", None, "not an event"))
    shown = drawn(view)
    assert [n for n in range(7) if f"alarm_{n}" in shown] == [2, 3, 4, 5, 6]
    assert "info_6" not in shown
    assert "not an event" not in shown
    view.close()


def test_the_panel_fits_a_narrow_terminal_and_steers_nothing() -> None:
    view = PanelView(terminal(), "evil\x1b[2J[red]", 300)
    view.on_step(STEP | {"buffer/dropped": {"\x1b[2J": 1}})
    view.on_event(event("error", "x" * 200 + "\x1b[2J"))
    shown = drawn(view, width=30)
    assert max(map(len, shown.splitlines())) == 30
    assert "\x1b[2J" not in shown
    assert "[red]" in drawn(view)
    view.close()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "▁"),
        ([2.0, 2.0], "▁▁"),
        ([0.0, 7.0, 3.5, 1.0], "▁█▅▂"),
        ([-1.0, 0.0], "▁█"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    assert sparkline(values) == line


class Recorder:
    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.drawn = threading.Event()

    def on_step(self, metrics: Mapping[str, Any]) -> None:
        self.seen.append(metrics["step"])

    def on_event(self, line: LogLine) -> None:
        self.seen.append(line.event)

    def draw(self) -> None:
        self.seen.append("draw")
        self.drawn.set()

    def close(self) -> None:
        self.seen.append("close")


def write(path: Path, **fields: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(fields) + "\n")


def test_a_viewer_shows_everything_up_to_the_end(tmp_path: Path) -> None:
    recorder = Recorder()
    viewer = Viewer(tmp_path, recorder)
    write(tmp_path / "metrics.jsonl", step=1)
    with ThreadPoolExecutor() as threads:
        following = threads.submit(viewer.follow)
        assert recorder.drawn.wait(10)
        assert recorder.seen[:2] == [1, "draw"]
        write(tmp_path / "logs" / "buffer-0.jsonl", timestamp="2026", event="run_ended")
        write(tmp_path / "metrics.jsonl", step=2)
        viewer.stop()
        following.result(10)
    seen = [each for each in recorder.seen if each != "draw"]
    assert sorted(map(str, seen)) == sorted(["1", "2", "run_ended", "close"])
    assert recorder.seen[-2:] == ["draw", "close"]


def test_a_view_is_closed_when_the_metrics_are_damaged(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("nonsense\n")
    recorder = Recorder()
    with pytest.raises(Exception, match="line 1"):
        Viewer(tmp_path, recorder).follow()
    assert recorder.seen == ["close"]


def test_the_view_fits_where_its_output_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TERM", raising=False)
    (tmp_path / "config.toml").write_text('name = "sums"\n[trainer]\nnum_steps = 300\n')
    write(tmp_path / "metrics.jsonl", **STEP)

    def show(console: Console) -> str:
        viewer = open_view(tmp_path, console)
        viewer.stop()
        viewer.follow()
        return text(console)

    assert show(pipe()).startswith("step 3/300  reward 0.250")
    assert "ratchet: sums" in show(terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert show(terminal()).startswith("step 3/300")


def test_a_directory_without_a_configuration_is_viewed_by_its_name(tmp_path: Path) -> None:
    for content in (None, "not = [toml", 'name = "x"\n'):
        if content is not None:
            (tmp_path / "config.toml").write_text(content)
        console = pipe()
        viewer = open_view(tmp_path, console)
        viewer._view.on_step(STEP)
        assert text(console).startswith("step 3  reward")
