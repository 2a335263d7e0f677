import asyncio
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratchet.observability.follow import LogDirectory, follow_logs, read_logs
from ratchet.observability.lines import LineFilter

LINES = 2000
WRITERS = 4


def line(second: int, **fields: Any) -> bytes:
    stamp = f"2026-01-01T00:00:{second:02d}.000000Z"
    return (
        json.dumps({"timestamp": stamp, "level": "info", "event": "e", **fields}).encode() + b"\n"
    )


def numbers(found: Any) -> list[int]:
    return [line.fields["n"] for line in found]


def test_what_is_there_is_merged_by_time_and_files_keep_their_order(tmp_path: Path) -> None:
    # 2 was stamped before 1 was written, by another thread of the same process
    (tmp_path / "a-0.jsonl").write_bytes(line(3, n=1) + line(2, n=2) + line(7, n=5))
    (tmp_path / "b-0.jsonl").write_bytes(line(1, n=0) + line(4, n=3) + line(6, n=4))
    (tmp_path / "notes.txt").write_bytes(line(1, n=9))
    assert numbers(read_logs(tmp_path)) == [0, 1, 2, 3, 4, 5]
    wanted = LineFilter(role="b")
    assert numbers(read_logs(tmp_path, wanted)) == [0, 3, 4]


def test_rotated_files_of_the_past_are_read_too(tmp_path: Path) -> None:
    (tmp_path / "a-0.jsonl.1").write_bytes(line(1, n=0))
    (tmp_path / "a-0.jsonl").write_bytes(line(2, n=1))
    found = list(read_logs(tmp_path))
    assert numbers(found) == [0, 1]
    assert {line.source for line in found} == {"a-0"}


def test_lines_that_are_not_json_stay_where_they_were_written(tmp_path: Path) -> None:
    (tmp_path / "a-0.jsonl").write_bytes(line(1, n=0) + b"Segfault \xff\n[1, 2]\n" + line(5, n=2))
    (tmp_path / "b-0.jsonl").write_bytes(line(3, n=1))
    found = list(read_logs(tmp_path))
    assert [line.fields and line.fields["n"] for line in found] == [0, None, None, 1, 2]
    assert [line.raw for line in found[1:3]] == ["Segfault \ufffd", "[1, 2]"]
    assert found[1].timestamp == found[0].timestamp


def test_standard_error_is_raw_and_stamped_by_its_last_write(tmp_path: Path) -> None:
    path = tmp_path / "a-0.err"
    path.write_bytes(b'{"event": "printed"}\n')
    os.utime(path, (0, 0))
    (found,) = read_logs(tmp_path)
    assert found == ("a-0", "1970-01-01T00:00:00.000000Z", None, '{"event": "printed"}')


def test_the_unfinished_last_line_is_shown_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a-0.jsonl").write_bytes(line(1, n=0) + b'{"event": "cu')
    (tmp_path / "b-0.jsonl").write_bytes(line(2, n=1) + line(3, n=2).rstrip())
    assert [line.raw for line in read_logs(tmp_path)][2:] == [
        '{"event": "cu',
        line(3, n=2).decode().rstrip(),
    ]


def test_a_file_without_newlines_does_not_fill_the_memory(tmp_path: Path) -> None:
    (tmp_path / "a-0.jsonl").write_bytes(b"x" * (3 << 20))
    found = list(read_logs(tmp_path))
    assert sum(len(line.raw) for line in found) == 3 << 20
    assert max(len(line.raw) for line in found) < (1 << 20) + (1 << 17)


def test_a_missing_directory_has_no_lines_yet(tmp_path: Path) -> None:
    assert list(read_logs(tmp_path / "logs")) == []


class Poller:
    """Polls a directory under a clock of the test's own, with no hold unless asked for."""

    def __init__(self, directory: Path) -> None:
        self.logs = LogDirectory(directory)
        self.now = 0.0

    def __call__(self, hold_s: float = 0.0) -> list[int]:
        self.now += 0.1
        return [
            line.fields["n"] if line.fields else line.raw
            for line in self.logs.new(self.now, hold_s)
        ]


@pytest.fixture
def poll(tmp_path: Path) -> Any:
    poller = Poller(tmp_path)
    yield poller
    poller.logs.close()


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def test_a_partial_line_waits_for_its_end(poll: Poller, tmp_path: Path) -> None:
    whole = line(1, n=0)
    for cut in range(1, len(whole)):
        path = tmp_path / f"w-{cut}.jsonl"
        append(path, whole[:cut])
        assert poll() == []
        append(path, whole[cut:])
        assert poll() == [0]


def test_new_files_are_found(poll: Poller, tmp_path: Path) -> None:
    assert poll() == []
    append(tmp_path / "a-0.jsonl", line(1, n=0))
    assert poll() == [0]
    append(tmp_path / "b-0.jsonl", line(2, n=1))
    append(tmp_path / "a-0.jsonl", line(3, n=2))
    assert poll() == [1, 2]


def test_lines_of_one_file_keep_their_order(poll: Poller, tmp_path: Path) -> None:
    append(tmp_path / "a-0.jsonl", line(3, n=0) + line(2, n=1) + line(4, n=3))
    append(tmp_path / "b-0.jsonl", line(3, n=2))
    assert poll() == [0, 1, 2, 3]


def test_a_renamed_file_is_read_to_its_end_and_its_successor_from_its_start(
    poll: Poller, tmp_path: Path
) -> None:
    path, old = tmp_path / "a-0.jsonl", tmp_path / "a-0.jsonl.1"
    writer = path.open("ab", buffering=0)
    writer.write(line(1, n=0) + b'{"timestamp": "2026-01-01T00:00:02", ')
    assert poll() == [0]
    path.rename(old)
    assert poll() == []  # between the rename and the new file
    append(path, line(3, n=2))
    writer.write(b'"n": 1}\n')  # the writer goes on in the renamed file for a while
    writer.close()
    assert poll() == [1, 2]
    for generation in (2, 3):  # and again, with the older ones moved on
        old.rename(tmp_path / f"a-0.jsonl.{generation}")
        path.rename(old)
        append(path, line(3 + generation, n=1 + generation))
        assert poll() == [1 + generation]


def test_a_truncated_file_is_read_from_its_start(poll: Poller, tmp_path: Path) -> None:
    path = tmp_path / "a-0.jsonl"
    append(path, line(1, n=0) + line(1, n=1) + b'{"n": 7, "half')
    assert poll() == [0, 1]
    os.truncate(path, 0)
    append(path, line(2, n=2))
    assert poll() == [2]


def test_a_copy_made_before_truncating_is_not_shown_again(poll: Poller, tmp_path: Path) -> None:
    path = tmp_path / "a-0.jsonl"
    append(path, line(1, n=0) + line(2, n=1))
    assert poll() == [0, 1]
    append(path, line(3, n=2))
    (tmp_path / "a-0.jsonl.1").write_bytes(path.read_bytes())
    os.truncate(path, 0)
    append(path, line(4, n=3))
    assert poll() == [2, 3]


def test_a_file_that_lived_and_was_renamed_between_two_looks_is_not_missed(
    poll: Poller, tmp_path: Path
) -> None:
    path = tmp_path / "a-0.jsonl"
    append(path, line(1, n=0))
    assert poll() == [0]
    for n in (1, 2):
        path.rename(tmp_path / f"a-0.jsonl.{3 - n}")
        append(path, line(1 + n, n=n))
    assert poll() == [1, 2]


def test_a_removed_file_is_read_to_its_end_and_let_go(poll: Poller, tmp_path: Path) -> None:
    path = tmp_path / "a-0.jsonl"
    append(path, line(1, n=0))
    assert poll() == [0]
    append(path, line(1, n=1))
    path.unlink()
    assert poll() == [1]
    assert poll.logs._files == {}
    append(path, line(1, n=2))
    assert poll() == [2]


def test_a_line_waits_for_earlier_ones_of_other_files(poll: Poller, tmp_path: Path) -> None:
    append(tmp_path / "a-0.jsonl", line(2, n=1))
    assert poll(hold_s=0.25) == []
    append(tmp_path / "b-0.jsonl", line(1, n=0))
    assert poll(hold_s=0.25) == []
    assert poll(hold_s=0.25) == []
    assert poll(hold_s=0.25) == [0, 1]
    append(tmp_path / "b-0.jsonl", line(1, n=2))  # too late: shown all the same
    assert poll() == [2]


WRITER = """
import os, sys, time
from pathlib import Path
from ratchet.observability.logs import configure_logging

directory, rank, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
path = directory / f"rollout-{rank}.jsonl"
log = configure_logging(path, role=f"rollout-{rank}", run="r")
for n in range(count):
    if n and n % 500 == 0:  # rotated by renaming
        path.rename(directory / f"rollout-{rank}.jsonl.{n // 500}")
        log = configure_logging(path, role=f"rollout-{rank}", run="r")
    log.info("event", n=n)
"""


def test_every_line_of_several_rotating_writers_is_seen_once_and_in_order(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(rank), str(LINES)])
        for rank in range(WRITERS)
    ]

    def ended() -> bool:
        return all(writer.poll() is not None for writer in writers)

    async def scenario() -> list[Any]:
        wanted = LineFilter(event="event")
        async with asyncio.timeout(60):
            return [line async for line in follow_logs(tmp_path, wanted, until=ended, poll_s=0.005)]

    found = asyncio.run(scenario())
    assert [writer.wait() for writer in writers] == [0] * WRITERS
    assert len(found) == WRITERS * LINES
    for rank in range(WRITERS):
        of_rank = [line.fields["n"] for line in found if line.source == f"rollout-{rank}"]
        assert of_rank == list(range(LINES))
    exact = [
        (line.source, line.fields["n"]) for line in read_logs(tmp_path, LineFilter(event="event"))
    ]
    assert len(exact) == WRITERS * LINES
    stamps = [line.timestamp for line in read_logs(tmp_path)]
    assert stamps == sorted(stamps)


def test_following_merges_within_the_window(tmp_path: Path) -> None:
    """Several writers in bursts: sorted, as no line comes later than the hold."""
    rng = random.Random(3)
    waiting = [line(n // 10, n=n) for n in range(50)]
    logs, now, found = LogDirectory(tmp_path), 0.0, []
    while waiting or now < 10:
        burst = [waiting.pop(0) for _ in range(min(len(waiting), 4))]
        rng.shuffle(burst)
        for content in burst:
            append(tmp_path / f"w-{rng.randrange(4)}.jsonl", content)
            found += logs.new(now, hold_s=0.25)
        now += 0.3
    found += logs.new(now + 1, hold_s=0.25)
    logs.close()
    stamps = [line.timestamp for line in found]
    assert len(found) == 50
    assert stamps == sorted(stamps)


def test_following_may_begin_with_what_is_new(tmp_path: Path) -> None:
    async def scenario() -> list[int]:
        append(tmp_path / "a-0.jsonl", line(1, n=0))
        looks = iter([False, True])

        def until() -> bool:
            append(tmp_path / "a-0.jsonl", line(2, n=1))
            return next(looks)

        async with asyncio.timeout(10):
            return numbers(
                [
                    line
                    async for line in follow_logs(
                        tmp_path, until=until, from_start=False, poll_s=0.001
                    )
                ]
            )

    assert asyncio.run(scenario()) == [1, 1]
