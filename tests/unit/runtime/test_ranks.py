import io
import os
from pathlib import Path

import msgspec
import pytest
import structlog

from ratchet.runtime.placement import RankSpec, RoleSpec, TlsFiles
from ratchet.runtime.ranks import Gang
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
