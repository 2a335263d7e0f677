"""A base model, made once for each suite."""

from pathlib import Path

import pytest
from tests.helpers.training import training_config, write_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(training_config(), tmp_path_factory.mktemp("base") / "model")
