"""The advantages and losses that a configuration can choose, by name or by "module:object".

Consumes the algorithm's section of the configuration, produces callables; waits for nothing. Torch
is imported only when a loss is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ratchet.config import AlgorithmConfig
from ratchet.imports import import_chosen

if TYPE_CHECKING:
    from ratchet.algorithms.advantages import Advantage
    from ratchet.algorithms.losses import Loss

ADVANTAGES: Final = {
    "std": "ratchet.algorithms.advantages:std_advantages",
    "mean": "ratchet.algorithms.advantages:mean_advantages",
}
"""name -> a function from rewards to advantages"""

LOSSES: Final = {"grpo": "ratchet.algorithms.losses:GrpoLoss"}
"""name -> a factory that takes the `AlgorithmConfig`"""


def make_advantage(config: AlgorithmConfig) -> Advantage:
    """Return the function from the rewards of a group to its advantages.

    Raises:
        ConfigError: if `algorithm.advantage` names nothing that can be called.
    """
    return import_chosen("algorithm.advantage", config.advantage, ADVANTAGES)


def make_loss(config: AlgorithmConfig) -> Loss:
    """Return the loss, configured.

    Raises:
        ConfigError: if `algorithm.name` names nothing that can be called.
    """
    loss: Loss = import_chosen("algorithm.name", config.name, LOSSES)(config)
    return loss
