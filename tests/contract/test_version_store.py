"""What the registry relies on, in memory and on disk, and across the death of its process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet.errors import StaleTerm, UserError, VersionError
from ratchet.storage.versions import VersionStore
from ratchet.types import VersionRecord

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[VersionStore]:
    path = tmp_path / "versions.sqlite" if request.param == "file" else None
    store = VersionStore.open(path)
    yield store
    store.close()


def test_terms_only_rise(store: VersionStore) -> None:
    assert store.newest_term() == 0
    assert [store.acquire_term("trainer-0", name, 0.0) for name in "abc"] == [1, 2, 3]
    assert store.newest_term() == 3


def test_numbers_rise_from_zero_whatever_becomes_of_them(store: VersionStore) -> None:
    term = store.acquire_term("trainer-0", "a", 1.0)
    assert store.reserve(term, 0, None, 2.0) == 0
    store.commit(0, "d0", 3.0)
    assert store.reserve(term, 1, 0, 4.0) == 1
    store.burn(1, "no engine", 5.0)
    assert store.reserve(term, 1, 0, 6.0) == 2
    assert store.records() == (
        VersionRecord(0, 1, 0, None, "live", "d0", None, 2.0),
        VersionRecord(1, 1, 1, 0, "burnt", None, "no engine", 4.0),
        VersionRecord(2, 1, 1, 0, "reserved", None, None, 6.0),
    )
    assert store.record(1) == store.records()[1]
    assert store.record(3) is None


def test_a_version_comes_with_its_burnt_ancestors_down_to_the_first_live_one(
    store: VersionStore,
) -> None:
    term = store.acquire_term("trainer-0", "a", 0.0)
    for version in range(5):
        store.reserve(term, version, version - 1 if version else None, 0.0)
        if version < 2:
            store.commit(version, f"d{version}", 0.0)
        else:
            store.burn(version, "no engine", 0.0)
    found = store.with_burnt_ancestors((4, 3, 9))
    assert [record.version for record in found] == [4, 3, 2, 1]


def test_newest_live_skips_the_reserved_and_the_burnt(store: VersionStore) -> None:
    assert store.newest_live() is None
    term = store.acquire_term("trainer-0", "a", 0.0)
    for version in range(4):
        store.reserve(term, version, None, 0.0)
    assert store.newest_live() is None
    store.commit(0, "d0", 0.0)
    store.commit(2, "d2", 0.0)
    store.burn(3, "no engine", 0.0)
    live = store.newest_live()
    assert live is not None
    assert live.version == 2


@pytest.mark.parametrize("term", [0, 1, 3])
def test_only_the_newest_term_reserves(store: VersionStore, term: int) -> None:
    store.acquire_term("trainer-0", "a", 0.0)
    store.acquire_term("trainer-0", "b", 0.0)
    with pytest.raises(StaleTerm, match=f"term {term} is not the newest one, which is 2"):
        store.reserve(term, 0, None, 0.0)
    assert store.records() == ()


def test_commit_again_with_the_same_digest_changes_nothing(store: VersionStore) -> None:
    term = store.acquire_term("trainer-0", "a", 0.0)
    store.reserve(term, 0, None, 0.0)
    store.commit(0, "d0", 1.0)
    before = store.records()
    store.commit(0, "d0", 2.0)
    assert store.records() == before


def test_burn_again_keeps_the_first_reason(store: VersionStore) -> None:
    term = store.acquire_term("trainer-0", "a", 0.0)
    store.reserve(term, 0, None, 0.0)
    store.burn(0, "no engine", 0.0)
    store.burn(0, "another", 0.0)
    assert store.records()[0].reason == "no engine"


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda store: store.commit(9, "d", 0.0), "version 9 was never reserved"),
        (lambda store: store.burn(9, "x", 0.0), "version 9 was never reserved"),
        (lambda store: store.commit(0, "other", 0.0), r"version 0 is live \(d0\)"),
        (lambda store: store.burn(0, "x", 0.0), "version 0 is live and cannot be burnt"),
        (lambda store: store.commit(1, "d1", 0.0), r"version 1 is burnt \(no engine\)"),
    ],
)
def test_wrong_states_raise_and_change_nothing(
    store: VersionStore, wrong: Callable[[VersionStore], None], text: str
) -> None:
    term = store.acquire_term("trainer-0", "a", 0.0)
    store.reserve(term, 0, None, 0.0)
    store.commit(0, "d0", 0.0)
    store.reserve(term, 1, 0, 0.0)
    store.burn(1, "no engine", 0.0)
    before = store.records()
    with pytest.raises(VersionError, match=text):
        wrong(store)
    assert store.records() == before


def test_everything_is_there_after_opening_again(tmp_path: Path) -> None:
    path = tmp_path / "versions.sqlite"
    for restart in range(10):
        store = VersionStore.open(path)
        term = store.acquire_term("trainer-0", str(restart), 0.0)
        assert term == restart + 1
        assert store.reserve(term, restart, restart - 1 if restart else None, 0.0) == restart
        store.commit(restart, f"d{restart}", 0.0)
        store.close()
    store = VersionStore.open(path)
    assert [record.version for record in store.records()] == list(range(10))
    store.close()


CHILD = """
import sys
from pathlib import Path
from ratchet.storage.versions import VersionStore

store = VersionStore.open(Path(sys.argv[1]))
term = store.acquire_term("trainer-0", "child", 0.0)
version = store.reserve(term, 0, None, 0.0)
print(term, version, flush=True)
sys.stdin.read()  # killed here, between reserve and commit
"""


def test_a_number_is_spent_when_its_process_is_killed_before_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "versions.sqlite"
    given = []
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        ) as child:
            assert child.stdout is not None
            given.append(tuple(map(int, child.stdout.readline().split())))
            with pytest.raises(UserError, match="is being written by another process"):
                VersionStore.open(path)
            os.kill(child.pid, signal.SIGKILL)
    assert given == [(1, 0), (2, 1), (3, 2)]
    store = VersionStore.open(path)
    assert [record.state for record in store.records()] == ["reserved"] * 3
    assert store.reserve(store.acquire_term("trainer-0", "after", 0.0), 0, None, 0.0) == 3
    store.close()
