"""One real server for all of these tests; its log is shown with a test that fails.

A test that needs another one (killed, of two ranks, with keys) starts a `RealServer` itself: each
costs half a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.sglang_server import PYTHON, RealServer
from tests.helpers.tiny_models import write_tiny_model

_TAIL_LINES = 60
_TIMEOUT_S = 700  # the first test waits for the server


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    server = getattr(item, "funcargs", {}).get("real_server")
    if report.failed and server is not None:
        lines = server.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        report.sections.append(("SGLang's log", "\n".join(line[:300] for line in lines)))
    return report


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a Qwen3 of random float32 weights and one token per character."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture(scope="session")
def _one_server(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    assert PYTHON.exists(), "there is no environment for SGLang: make sglang-cpu"
    server = RealServer(real_model, tmp_path_factory.mktemp("server") / "sglang.log")
    yield server
    server.close()


@pytest.fixture
def real_server(_one_server: RealServer) -> RealServer:
    """The server, generating, with the base weights under the name "default"."""
    _one_server.reset()
    return _one_server


@pytest.fixture(scope="module")
def endless_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The server's model, for an engine that lets it never stop by itself."""
    return write_tiny_model(tmp_path_factory.mktemp("engine") / "model", eos_token_id=[])
