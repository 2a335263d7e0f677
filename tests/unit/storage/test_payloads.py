import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.training import make_groups

from ratchet.storage.payloads import Payloads
from ratchet.types import RolloutGroup

GROUP = make_groups(1, 2)[0]


def group(group_id: int, attempt: int = 0) -> RolloutGroup:
    return msgspec.structs.replace(GROUP, group_id=group_id, attempt=attempt)


def sealed(data: bytes) -> bytes:
    return data + zlib.crc32(data).to_bytes(4, "big")


@pytest.fixture
def payloads(tmp_path: Path) -> Iterator[Payloads]:
    payloads = Payloads(tmp_path / "payloads")
    yield payloads
    payloads.close()


def again(payloads: Payloads, root: Path) -> Payloads:
    """Another life, after all was written."""
    payloads.close()
    return Payloads(root / "payloads")


def files(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "payloads").iterdir())


def test_another_life_has_the_group_bit_for_bit(payloads: Payloads, tmp_path: Path) -> None:
    payloads.put(group(3, attempt=2), 10)
    assert payloads.get(3, 2) == group(3, 2)  # written or not
    second = again(payloads, tmp_path)
    assert second.kept == {3}
    assert second.get(3, 2) == group(3, 2)
    assert second.get(3, 1) is None  # another attempt
    assert second.get(4, 0) is None
    second.close()


def test_what_is_forgotten_leaves_nothing(payloads: Payloads, tmp_path: Path) -> None:
    for group_id in range(4):
        payloads.put(group(group_id), 10)
    payloads.forget([0, 2, 9])
    assert payloads.get(0, 0) is None
    again(payloads, tmp_path).close()
    assert files(tmp_path) == ["1.payload", "3.payload"]


def test_a_later_attempt_takes_the_place(payloads: Payloads, tmp_path: Path) -> None:
    payloads.put(group(1, attempt=0), 10)
    payloads.forget([1])
    payloads.put(group(1, attempt=1), 10)
    second = again(payloads, tmp_path)
    assert second.get(1, 1) == group(1, 1)
    second.close()


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:],
        lambda data: bytes(4),
        lambda data: sealed(b"\x00\x00\x00\x01\xc1"),  # no msgpack, in the right form
    ],
)
def test_a_torn_file_is_no_payload(payloads: Payloads, tmp_path: Path, damage: Any) -> None:
    payloads.put(group(1), 10)
    second = again(payloads, tmp_path)
    path = tmp_path / "payloads" / "1.payload"
    path.write_bytes(damage(path.read_bytes()))
    assert second.get(1, 0) is None
    second.close()


def test_what_a_crash_left_half_written_goes(tmp_path: Path) -> None:
    (tmp_path / "payloads").mkdir()
    (tmp_path / "payloads" / "1.new").write_bytes(b"half")
    payloads = Payloads(tmp_path / "payloads")
    assert payloads.kept == set()
    assert files(tmp_path) == []
    payloads.close()


def test_a_full_disk_costs_the_payload_only(
    payloads: Payloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    payloads.put(group(1, attempt=0), 10)
    payloads.close()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full)
        payloads = Payloads(tmp_path / "payloads")
        payloads.put(group(1, attempt=1), 10)
        payloads.close()
    assert "No space left" in payloads.error
    assert (payloads.num_failed, payloads.kept, files(tmp_path)) == (1, set(), [])
    assert payloads.get(1, 1) is None


def test_a_disk_that_is_too_slow_is_left_alone(
    payloads: Payloads, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    write = payloads._write
    monkeypatch.setattr(payloads, "_write", lambda group: (go_on.wait(), write(group)))
    payloads.put(group(1), 300 * 2**20)
    payloads.put(group(2), 1)  # more than may wait does so already
    assert payloads.kept == {1}
    assert "wait for the disk" in payloads.error
    go_on.set()
    payloads.close()
    assert payloads._pending_bytes == 0
    assert payloads.get(1, 0) == group(1)


def test_a_write_that_fails_does_not_give_up_the_next_one(
    payloads: Payloads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go_on = threading.Event(), threading.Event()
    write = payloads._write

    def fail_once(each: RolloutGroup) -> None:
        if each.attempt:
            write(each)
            return
        began.set()
        go_on.wait()
        raise OSError("No space left on device")

    monkeypatch.setattr(payloads, "_write", fail_once)
    payloads.put(group(1), 10)
    began.wait()
    payloads.put(group(1, attempt=1), 10)
    go_on.set()
    payloads._executor.submit(lambda: None).result()  # all before it is done
    assert payloads.get(1, 1) == group(1, 1)
    payloads.forget([1])
    again(payloads, tmp_path).close()
    assert files(tmp_path) == []
