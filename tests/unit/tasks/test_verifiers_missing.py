from __future__ import annotations

import sys
from types import ModuleType

import pytest

from ratchet.config import TaskConfig
from ratchet.errors import TaskError
from ratchet.tasks import verifiers
from ratchet.tasks.registry import build_task


def build(**args: object) -> None:
    build_task(TaskConfig(name="verifiers", args=args), seed=0)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "find_spec", lambda name: None)
    with pytest.raises(TaskError, match=r"not installed; pip install 'ratchet-rl\[verifiers\]'"):
        build(environment="gsm8k")


def test_a_library_of_another_api_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"verifiers": "here", "verifiers.v1": None}
    monkeypatch.setattr(verifiers, "find_spec", found.get)
    monkeypatch.setattr(verifiers, "version", lambda name: "0.9.0")
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    with pytest.raises(TaskError, match=r"verifiers 0\.9\.0 has an API that is not known here"):
        build(environment="gsm8k")


def test_wrong_arguments_name_field_value_and_way_out() -> None:
    with pytest.raises(TaskError, match=r"task\.args\.environment is missing"):
        build()
    with pytest.raises(TaskError, match=r"unknown key task\.args\.enviroment; did you mean"):
        build(environment="gsm8k", enviroment="gsm8k")
    with pytest.raises(TaskError, match=r"task\.args\.turns = 0: "):
        build(environment="gsm8k", turns=0)
