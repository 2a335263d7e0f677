import io
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from ratchet.runtime.placement import RankSpec, RoleSpec, TlsFiles
from ratchet.runtime.ranks import Gang
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.tree import is_last_word
from ratchet.types import RoleInfo

KEY = "5e" * 32


class Left(BaseException):
    """In the place of `os._exit`."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(os, "_exit", leave)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    return private


def gang(folder: Path, ranks: RankSpec) -> tuple[Gang, RoleSpec]:
    spec = RoleSpec(
        role=RoleInfo("trainer", "trainer-0", "life"),
        run_dir=str(folder.parent / "run"),
        run_id="r",
        listen="unix:/t.sock",
        registry="unix:/r.sock",
        key=KEY,
        config="# " + "x" * 200_000,
        token_file="/secret/token",
        tls=TlsFiles("ca", "cert", "key"),
        ranks=ranks,
    )
    return Gang(spec, ranks, folder, structlog.get_logger()), spec


def lines(fifo: Path) -> list[bytes]:
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return os.read(reader, 2**20).splitlines()
    finally:
        os.close(reader)


def test_only_rank_0_is_told_the_secrets(folder: Path) -> None:
    made, spec = gang(folder, RankSpec(2))
    made.prepare()
    (first,), (second,) = lines(folder / "0.in"), lines(folder / "1.in")
    assert msgspec.json.decode(first, type=RoleSpec) == spec
    told = msgspec.json.decode(second, type=RoleSpec)
    assert told == msgspec.structs.replace(spec, key="", token_file=None, tls=None)
    assert KEY.encode() not in second


@pytest.mark.parametrize(("node_rank", "heard"), [(0, [b"stop"]), (1, [])])
def test_commands_go_to_rank_0_and_the_launcher_s_end_is_ours(
    folder: Path, node_rank: int, heard: list[bytes]
) -> None:
    made, _ = gang(folder, RankSpec(2, 2, node_rank, "127.0.0.1:1"))
    made.prepare()
    hold = os.open(folder / "0.in", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(Left, match="1"):
        made.forward(io.BytesIO(b"stop\n"))
    assert os.read(hold, 2**20).splitlines()[1:] == heard
    os.close(hold)
    assert not folder.exists()


class Heard:
    """Stands in for the rendezvous."""

    def __init__(self, news: str | None = None) -> None:
        self.news = news
        self.told: list[tuple[str, bool]] = []

    def fail(self, detail: str, *, for_good: bool = False) -> None:
        self.told.append((detail, for_good))

    def hear(self, within_s: float) -> str | None:
        return self.news


MISSED = "RunFailed: Read failed on rank 0 alone: x (a rank of the trainer was lost while ...)"
ELSEWHERE = "node 1 of the trainer failed: rank 1 of the trainer died of signal 9"
FOR_GOOD = "node 1 of the trainer failed for good: RunFailed: 3 steps in a row were not finite"


@pytest.mark.parametrize(
    ("outcome", "news", "told", "says"),
    [
        (RoleOutcome("failed", "rank 1 died"), ELSEWHERE, ("rank 1 died", False), None),
        (RoleOutcome("failed", "RunFailed: no"), ELSEWHERE, ("RunFailed: no", True), None),
        (RoleOutcome("user_error", "mend it"), ELSEWHERE, ("mend it", True), None),
        (
            RoleOutcome("failed", MISSED),
            None,
            (f"trainer-0: {MISSED}", False),
            RoleOutcome("failed", f"trainer-0: {MISSED}"),
        ),
        (
            RoleOutcome("failed", MISSED),
            ELSEWHERE,
            (f"trainer-0: {MISSED}", False),
            RoleOutcome("failed", ELSEWHERE),
        ),
        (
            RoleOutcome("failed", MISSED),
            FOR_GOOD,
            (f"trainer-0: {MISSED}", False),
            RoleOutcome("run_failed", FOR_GOOD),
        ),
    ],
)
def test_a_rank_that_was_lost_is_no_last_word_and_the_first_cause_is_told(
    folder: Path,
    outcome: RoleOutcome,
    news: str | None,
    told: tuple[str, bool],
    says: RoleOutcome | None,
) -> None:
    made, _ = gang(folder, RankSpec(1, 2, 0, "127.0.0.1:1"))
    heard: Any = Heard(news)
    found = made._failed(outcome, heard)
    assert found == (says or outcome)
    assert heard.told == [told]
    assert is_last_word(found) == (outcome.detail == "RunFailed: no")
