"""A ring in shared memory and its readers, each on a thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.helpers.shared_ends import Ends


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()
