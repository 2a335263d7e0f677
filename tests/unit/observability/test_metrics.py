import threading
from pathlib import Path

import pytest

from ratchet.errors import UserError
from ratchet.observability.metrics import (
    MetricsReader,
    MetricsWriter,
    cut_metrics,
    follow_metrics,
    read_metrics,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_each_line_is_there_when_write_returns(path: Path) -> None:
    writer = MetricsWriter(path)
    assert read_metrics(path) == []
    writer.write({"step": 1, "loss": float("nan"), "dropped": {"stale": 2}})
    assert read_metrics(path) == [{"step": 1, "loss": None, "dropped": {"stale": 2}}]
    writer.write({"step": 2})
    assert [line["step"] for line in read_metrics(path)] == [1, 2]
    writer.close()


def test_a_second_writer_appends_after_the_last_whole_line(path: Path) -> None:
    path.write_bytes(b'{"step":1}\n{"step":2,"loss":0.')
    assert [line["step"] for line in read_metrics(path)] == [1]
    writer = MetricsWriter(path)
    writer.write({"step": 2})
    writer.close()
    assert path.read_bytes() == b'{"step":1}\n{"step":2}\n'


def test_a_missing_file_has_no_metrics_yet(path: Path) -> None:
    assert read_metrics(path) == []
    assert list(follow_metrics(path, until=lambda: True)) == []


@pytest.mark.parametrize("bad", [b"nonsense", b"[1]", b"\xff\xfe"])
def test_a_damaged_line_is_named(path: Path, bad: bytes) -> None:
    path.write_bytes(b'{"step":1}\n' + bad + b"\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: "):
        read_metrics(path)


def test_a_reader_goes_on_where_it_was_and_waits_for_the_end_of_a_line(path: Path) -> None:
    reader = MetricsReader(path)
    assert reader.new() == []
    with path.open("ab", buffering=0) as file:
        file.write(b'{"step":1}\n{"st')
        assert reader.new() == [{"step": 1}]
        assert reader.new() == []
        file.write(b'ep":2}\n')
        assert reader.new() == [{"step": 2}]


def test_following_yields_from_the_first_line_to_the_last_of_an_ended_run(path: Path) -> None:
    writer = MetricsWriter(path)
    writer.write({"step": 1})
    ended = threading.Event()
    seen = []
    for line in follow_metrics(path, until=ended.is_set, poll_s=0.001):
        seen.append(line["step"])
        if line["step"] < 4:
            writer.write({"step": line["step"] + 1})
        if line["step"] == 3:
            ended.set()
    assert seen == [1, 2, 3, 4]
    writer.close()


def test_what_is_written_just_before_the_end_is_not_missed(path: Path) -> None:
    writer = MetricsWriter(path)

    def until() -> bool:  # the run writes its last line and ends between two looks
        writer.write({"step": 1})
        return True

    assert list(follow_metrics(path, until=until)) == [{"step": 1}]
    writer.close()


def test_lines_past_a_step_are_put_aside_and_none_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    cut_metrics(path, 3)
    assert not path.exists()
    for lost in ([3, 4], [3]):
        path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 5)) + '{"st')
        before = path.stat().st_ino
        cut_metrics(path, 4 - len(lost))
        assert [line["step"] for line in read_metrics(path)] == list(range(1, 5 - len(lost)))
        assert path.stat().st_ino != before  # who still has it open spoils nothing
        cut_metrics(path, 4)
    aside = read_metrics(tmp_path / "metrics.lost.jsonl")
    assert [line["step"] for line in aside] == [3, 4, 4]


def test_a_reader_goes_on_behind_what_is_left_of_a_file_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1}\n{"step":2}\n{"step":3,"a":1}\n')
    reader = MetricsReader(path)
    assert [line["step"] for line in reader.new()] == [1, 2, 3]
    cut_metrics(path, 1)
    with path.open("a") as file:
        file.write('{"step":2}\n{"step":3,"a":2}\n{"step":4}\n')
    assert [line["step"] for line in reader.new()] == [3, 4]  # the second is as it was
    with path.open("a") as file:
        file.write('{"step":5}\n')
    assert [line["step"] for line in reader.new()] == [5]
