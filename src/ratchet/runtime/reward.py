"""Naming a user's reward function such that the processes of a run can import it.

Consumes a function, produces a configuration that names it; waits for nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from ratchet.config import Config
from ratchet.errors import ConfigError
from ratchet.types import Prompt

Reward: TypeAlias = Callable[[Prompt, str], float]


def with_reward(config: Config, reward: Reward) -> Config:
    """Return the configuration with the reward in place of the task's score.

    Raises:
        ConfigError: if another process could not import it.
    """
    module = inspect.getmodule(reward)
    name = getattr(reward, "__qualname__", "")
    if module is None or not name or "<" in name or "." in name:
        msg = (
            f"reward {reward!r} cannot be imported by another process: define it at the top level"
            " of a module or script, or use in_process=True"
        )
        raise ConfigError(msg)
    task = config.task.model_copy(update={"reward": f"{_source(module)}:{name}"})
    return config.model_copy(update={"task": task})


def _source(module: ModuleType) -> str:
    """Name a module such that a process with another import path finds it."""
    spec = module.__spec__
    if spec is not None and module.__package__:
        return spec.name  # also of `python -m package.module`, whose __name__ is "__main__"
    file = Path(getattr(module, "__file__", None) or "<none>")
    if file.is_file():
        return str(file.resolve())
    if module.__name__ != "__main__":
        return module.__name__
    msg = (
        "a reward that was typed into a notebook or an interactive session cannot be imported by"
        " another process: put it into a file, or use in_process=True"
    )
    raise ConfigError(msg)
