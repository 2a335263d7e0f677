"""Every test, and every process that a test starts, computes on one thread: the cores are few."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported
os.environ["HF_HUB_OFFLINE"] = "1"
