"""What a keeper writes down of its server's output."""

from __future__ import annotations

import io
from pathlib import Path

from ratchet.backends.rollout.sglang.keeper import Log


def test_a_key_that_is_a_part_of_another_leaves_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("ab", buffering=0) as file:
        log = Log(file, ["a" * 16, "a" * 16 + "-the-rest"])
        log.take(io.BytesIO(b"api_key='" + b"a" * 16 + b"-the-rest', other='" + b"a" * 16 + b"'"))
        log.close()
    assert path.read_text() == "api_key='***', other='***'"
