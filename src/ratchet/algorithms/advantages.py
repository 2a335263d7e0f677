"""Group advantages: how much better than its siblings a rollout was.

Consumes the rewards of one group, produces one advantage per trajectory; waits for nothing. Pure
numpy. G is the number of trajectories that are trained: masking may leave fewer than the group
size, and a single one has the advantage 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Advantage: TypeAlias = Callable[[Floats], Floats]
"""rewards [G] -> advantages [G]"""

EPSILON: Final = 1e-4
"""Added to the standard deviation, so that a group whose rewards barely differ is not blown up."""


def std_advantages(rewards: Floats) -> Floats:
    """Return (r - mean) / (std + 1e-4), as in GRPO (arXiv:2402.03300).

    The standard deviation is the sample's (divided by G - 1), as common implementations take it:
    for G = 8 the advantages are 0.935 of what the population's would give. Equal rewards give exact
    zeros.
    """
    centred = mean_advantages(rewards)
    if not centred.any():
        return centred
    scaled: Floats = centred / (math.sqrt(centred @ centred / (len(centred) - 1)) + EPSILON)
    return scaled


def mean_advantages(rewards: Floats) -> Floats:
    """Return r - mean, as in Dr. GRPO (arXiv:2503.20783). Equal rewards give exact zeros."""
    if (rewards == rewards[0]).all():  # the rounded mean can differ from all of them
        return np.zeros_like(rewards)
    centred: Floats = rewards - rewards.mean()
    return centred
