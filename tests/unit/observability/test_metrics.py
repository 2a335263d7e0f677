import threading
from pathlib import Path

import pytest

from ratchet.errors import UserError
from ratchet.observability.metrics import (
    MetricsReader,
    MetricsWriter,
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
