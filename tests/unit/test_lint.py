"""The rule of pyproject.toml that keeps what a simulation cannot repeat out of actors and links."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIRECT = """
from time import monotonic
import time
from datetime import datetime
import random
import secrets
import uuid
import os; os.urandom(8)
import asyncio; asyncio.create_task(x)
asyncio.ensure_future(x)
asyncio.to_thread(x)
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from threading import Timer
""".strip()


def banned_lines(path: str, source: str) -> list[int]:
    """The lines of a module at this path that the project's own rules find banned."""
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format", "json"]
    done = subprocess.run(
        [*ruff, "--stdin-filename", path, "-"],
        input=source,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    return [each["location"]["row"] for each in found if each["code"] == "TID251"]


@pytest.mark.parametrize(
    "path", ["actors/new.py", "actors/trainer.py", "transport/new.py", "transport/mailbox/dial.py"]
)
def test_clock_randomness_ids_and_tasks_are_injected(path: str) -> None:
    assert banned_lines(f"src/ratchet/{path}", DIRECT) == list(range(1, DIRECT.count("\n") + 2))


def test_what_is_injected_passes_and_other_layers_are_free() -> None:
    injected = (
        "import asyncio, threading\nlock = threading.Lock()\nasyncio.get_running_loop().time()"
    )
    assert banned_lines("src/ratchet/actors/new.py", injected) == []
    assert banned_lines("src/ratchet/runtime/new.py", DIRECT) == []
    assert banned_lines("tests/unit/new.py", DIRECT) == []
