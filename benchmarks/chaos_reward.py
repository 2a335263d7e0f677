"""A reward that takes its time, for steps that last without a core: of `benchmarks.chaos`.

Consumes a completion, produces the copy task's score of it; waits for as long as the environment
says.
"""

from __future__ import annotations

import os
import time
from typing import Final

from ratchet.tasks.copy import share_of_right_positions
from ratchet.types import Prompt

COMPLETION_S: Final = "CHAOS_COMPLETION_S"
"""environment variable: seconds for each completion"""


def score(prompt: Prompt, completion: str) -> float:
    """Score a completion, late."""
    time.sleep(float(os.environ[COMPLETION_S]))
    return share_of_right_positions(prompt.text.removesuffix(">"), completion)
