"""The contract of rollout engines, on the SGLang engine and a real server."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.test_rollout_engine import *  # noqa: F403 - all of its tests
from tests.contract.test_rollout_engine_weights import *  # noqa: F403 - and all of these
from tests.helpers.rollout_engines import CONTEXT, Subject
from tests.helpers.sglang_server import RealServer, attached_config

from ratchet.backends.rollout.sglang.engine import SGLangEngine


@pytest.fixture
def subject(real_server: RealServer, endless_model: Path) -> Subject:
    """The server's own model may end a completion; the engine's copy of it says that it may not."""
    config = attached_config(real_server, endless_model)
    return Subject(
        lambda: SGLangEngine(config, endless_model),
        context=CONTEXT - 2,
        has_seeds=False,
        reads_back=False,
        url=real_server.url,
    )
