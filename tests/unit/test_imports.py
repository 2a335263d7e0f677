from pathlib import Path

import pytest

from ratchet.errors import ConfigError
from ratchet.imports import import_chosen, import_object


def test_module_and_object() -> None:
    assert import_object("ratchet.errors:ConfigError") is ConfigError


def test_a_file_is_executed_once(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n@dataclass\nclass Reward:\n    x: int = 3\n"
    )
    first = import_object(f"{path}:Reward")
    assert first is import_object(f"{path}:Reward")
    assert first().x == 3  # type: ignore[operator]


def test_two_files_of_one_name_do_not_mix(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"which = {folder!r}\n")
    assert import_object(f"{tmp_path}/a/mine.py:which") == "a"
    assert import_object(f"{tmp_path}/b/mine.py:which") == "b"


def test_a_relative_path_starts_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("x = 1\n")
    monkeypatch.chdir(tmp_path)
    assert import_object("mine.py:x") == 1


@pytest.mark.parametrize("reference", ["plain", "module:", ":object", ""])
def test_malformed(reference: str) -> None:
    with pytest.raises(ConfigError, match="not of the form"):
        import_object(reference)


def test_no_such_module_says_how_to_mend_it() -> None:
    with pytest.raises(ConfigError, match=r"no module 'no_such_thing'.*PYTHONPATH.*file.py:object"):
        import_object("no_such_thing.sub:object")


def test_no_such_file() -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        import_object("/nowhere/mine.py:object")


def test_no_such_object_lists_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("alpha = 1\nbeta = 2\n")
    with pytest.raises(ConfigError, match="has no 'gamma'; it has: alpha, beta"):
        import_object(f"{tmp_path}/mine.py:gamma")


def test_a_file_that_raises_is_named_and_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import no_such_dependency\n")
    with pytest.raises(ConfigError, match=r"failed while importing.*no_such_dependency"):
        import_object(f"{path}:x")
    path.write_text("raise SystemExit(0)\n")  # it would end the command as if all were well
    with pytest.raises(ConfigError, match="failed while importing: SystemExit: 0"):
        import_object(f"{path}:x")
    path.write_text("x = 5\n")
    assert import_object(f"{path}:x") == 5


def test_a_missing_dependency_inside_a_module_is_not_called_a_missing_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_user_module.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"failed while importing.*no_such_dependency"):
        import_object("broken_user_module:x")


KNOWN = {"config": "ratchet.errors:ConfigError", "lazy": "no_such_module:object"}


def test_chosen_by_name_or_by_reference() -> None:
    assert import_chosen("a.b", "config", KNOWN) is ConfigError
    assert import_chosen("a.b", "ratchet.errors:ConfigError", KNOWN) is ConfigError


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"a\.b = 'confg' is not known; use one of config, lazy"):
        import_chosen("a.b", "confg", KNOWN)


def test_what_is_chosen_must_be_callable() -> None:
    with pytest.raises(ConfigError, match=r"a\.b = 'ratchet\.errors:__name__' names a str"):
        import_chosen("a.b", "ratchet.errors:__name__", KNOWN)
