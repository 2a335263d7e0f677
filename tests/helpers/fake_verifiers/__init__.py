"""Stand-ins for the verifiers library, which brings a hundred packages: what the adapters use of
it, and no more. Each module here is one of its APIs; where the library itself is installed in that
version, the tests run on it, and so tell whether the stand-in is like it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def install_classic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import verifiers` give the API up to 0.3, and `import datasets` what it needs."""
    if not _is_installed(classic=True):
        from tests.helpers.fake_verifiers import classic

        _install(monkeypatch, "verifiers", classic)
        _install(monkeypatch, "verifiers.clients", classic)
        _install(monkeypatch, "datasets", classic)


def install_tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `import verifiers.v1` give the API from 0.4 on."""
    if not _is_installed(classic=False):
        from tests.helpers.fake_verifiers import tasksets

        _install(monkeypatch, "verifiers", None)
        for name in ("verifiers.v1", "verifiers.v1.state", "verifiers.v1.utils.loaders"):
            _install(monkeypatch, name, tasksets)


def _is_installed(*, classic: bool) -> bool:
    if importlib.util.find_spec("verifiers") is None:
        return False
    return hasattr(importlib.import_module("verifiers"), "load_environment") is classic


def _install(monkeypatch: pytest.MonkeyPatch, name: str, source: ModuleType | None) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    if source is not None:
        module.__dict__.update({k: v for k, v in vars(source).items() if not k.startswith("__")})
    monkeypatch.setitem(sys.modules, name, module)
