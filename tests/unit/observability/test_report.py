import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.helpers.rundirs import write_ledgers

from ratchet.errors import UserError
from ratchet.observability.logs import configure_logging
from ratchet.observability.metrics import MetricsWriter
from ratchet.observability.report import EvalResult, Summary, make_report, print_report
from ratchet.stats import Tally


def population(name: str, tokens: Sequence[int], rewards: Sequence[float]) -> dict[str, Any]:
    found = {"tokens": Tally(), "reward": Tally()}
    found["tokens"].add(tokens)
    found["reward"].add(rewards)
    return {f"buffer/{name}/{key}": tally.read().summary() for key, tally in found.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / "sums"
    (root / "logs").mkdir(parents=True)
    write_ledgers(root)
    writer = MetricsWriter(root / "metrics.jsonl")
    for step in range(1, 31):
        writer.write(
            {
                "step": step,
                "time_s": step * 2.0,
                "applied": step != 7,
                "reward_mean": step / 30,
                "buffer/staleness_histogram": {"0": 3, "2": 1},
                "buffer/two_version_rollouts": 2,
                "buffer/retried": {"aborted": 1},
                **population("offered", (10, 90 if step > 3 else 50), (0.0, 1.0)),
                **population("trained", (10,), (1.0,)),
                **population("lost", (90,) if step > 3 else (), ()),
                "tokens_per_s": 100.0 * (step % 2),
                "trainer_busy_share": 0.5,
                "rollout_busy_share": 0.75,
            }
        )
    writer.close()
    summary: dict[str, Any] = {
        "status": "finished",
        "reason": None,
        "steps": 29,
        "eval_before": {"version": 0, "accuracy": 0.125, "num_prompts": 64, "num_failed": 0},
        "eval_after": {"version": 30, "accuracy": 0.5, "num_prompts": 63, "num_failed": 1},
        "from_a_newer_release": 1,
    }
    (root / "summary.json").write_text(json.dumps(summary))
    lines = [
        {"timestamp": "2026", "level": level} for level in ("info", "warning", "error", "error")
    ]
    (root / "logs" / "a-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def printed(root: Path) -> str:
    out = io.StringIO()
    print_report(root, Console(file=out, width=100))
    return out.getvalue()


def test_a_report(run: Path) -> None:
    report = make_report(run)
    assert report.summary == Summary(
        "finished", None, 29, EvalResult(0, 0.125, 64), EvalResult(30, 0.5, 63, 1)
    )
    assert (report.num_steps, report.num_skipped_steps, report.seconds) == (30, 1, 60.0)
    assert report.edge_steps == 3
    assert report.reward_first == pytest.approx(2 / 30)
    assert report.reward_last == pytest.approx(29 / 30)
    assert report.versions == {"burnt": 1, "live": 2, "reserved": 1}
    assert report.groups == {"dropped": 3, "issued": 1, "trained": 2}
    assert report.dropped == {"failed": 1, "stale": 2}
    assert report.staleness == {0: 90, 2: 30}
    assert (report.retried, report.two_version_rollouts) == (30, 60)
    assert report.offered_reward_first == report.offered_reward_last == 0.5
    counts = {name: each.count for name, each in report.tokens.items()}
    assert counts == {"offered": 60, "trained": 30, "lost": 27}
    assert report.tokens["offered"].mean == pytest.approx((30 * 10 + 3 * 50 + 27 * 90) / 60)
    assert (report.tokens_per_s, report.trainer_busy_share) == (50.0, 0.5)
    assert (report.num_errors, report.num_warnings) == (2, 1)


def test_its_text(run: Path) -> None:
    lines = {" ".join(line.split()) for line in printed(run).splitlines()}
    assert {
        "status finished",
        "steps 30, 1 skipped, 60 s",
        "reward 0.067 -> 0.967 (means of the first and last 3 steps)",
        "held out 0.125 (version 0, 64 prompts) -> 0.500 (version 30, 63 prompts, 1 failed)",
        "versions burnt 1, live 2, reserved 1",
        "dropped failed 1, stale 2",
        "all groups 0.500 -> 0.500 (rewards of the dropped ones included)",
        "lengths offered 48 (p90 90), trained 10 (p90 10), lost 90 (p90 90)",
        "rewards offered 0.500 (p90 1), trained 1.000 (p90 1), lost -",
        "staleness 0: 90 (75%), 2: 30 (25%)",
        "busy trainer 50%, engines 75%",
        "log 2 errors, 1 warnings",
        f"ratchet logs {run} --level warning",
        f"ratchet groups {run} --state dropped",
        f"{run}/metrics.jsonl",
    } <= lines


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    report = make_report(tmp_path)
    assert report.summary.status == "unfinished"
    assert (report.num_steps, report.reward_first, report.versions) == (0, None, {})
    lines = {" ".join(line.split()) for line in printed(tmp_path).splitlines()}
    assert {
        "status unfinished",
        "held out - -> -",
        "dropped none",
        f"ratchet logs {tmp_path}",
    } <= lines


def test_a_failed_run_says_why(run: Path) -> None:
    (run / "summary.json").write_text('{"status": "failed", "reason": "no \\u001b[2J batch"}')
    assert r"failed: no \x1b[2J batch" in printed(run)


def test_real_logs_are_counted(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    log = configure_logging(tmp_path / "logs" / "a-0.jsonl", role="a", run="r")
    log.warning("w")
    log.error("e")
    report = make_report(tmp_path)
    assert (report.num_errors, report.num_warnings) == (1, 1)


@pytest.mark.parametrize(
    "name", ["summary.json", "versions.sqlite", "ledger.sqlite", "metrics.jsonl"]
)
def test_a_damaged_file_is_named(run: Path, name: str) -> None:
    (run / name).write_bytes(b"nonsense\n" * 1000)
    with pytest.raises(UserError, match=name):
        make_report(run)


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a directory"):
        make_report(tmp_path / "nowhere")
