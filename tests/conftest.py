"""Every test, and every process that a test starts, computes on one thread: the cores are few."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported
os.environ["HF_HUB_OFFLINE"] = "1"
# torch asks for the name behind every address that it connects to; a lost answer would cost 5 s
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"


@pytest.fixture(autouse=True)
def _no_thread_is_left_behind() -> Iterator[None]:
    """A thread of one test must not act in the next one."""
    before = set(threading.enumerate())
    yield
    end = time.monotonic() + 30
    for thread in set(threading.enumerate()) - before:
        if thread.name == "tqdm_monitor":  # tqdm keeps it for the whole process
            continue
        if isinstance(thread, threading._DummyThread):  # of a library, not started by Python
            continue
        thread.join(max(0.0, end - time.monotonic()))
        assert not thread.is_alive(), f"{thread.name} is left behind"
