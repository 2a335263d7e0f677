import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _standard_logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:] = handlers
    root.setLevel(level)
