"""The configuration of a run: typed, frozen, validated; one TOML file in, one resolved TOML file
out.

Consumes a TOML file and `a.b=c` overrides, produces a `Config` or a `ConfigError` that names each
field, its value and the way out. Waits for nothing. The validators here need no heavy import; what
needs a tokenizer or a task (a prompt longer than the context, a task that does not import) is
checked by `runtime.prepare` before anything is written.
"""

from __future__ import annotations

from ratchet.config.buffer import BufferConfig, FilterName, UnusedName
from ratchet.config.load import load_config, parse_config
from ratchet.config.model import LoraConfig, ModelConfig
from ratchet.config.rollout import EvalConfig, RolloutConfig
from ratchet.config.run import Config
from ratchet.config.runtime import RuntimeConfig, TlsConfig
from ratchet.config.sglang import SGLangConfig
from ratchet.config.task import OneTaskConfig, TaskConfig
from ratchet.config.training import (
    AlgorithmConfig,
    CheckpointConfig,
    TrainerConfig,
    WarmStartConfig,
    WeightsConfig,
)

__all__ = [
    "AlgorithmConfig",
    "BufferConfig",
    "CheckpointConfig",
    "Config",
    "EvalConfig",
    "FilterName",
    "LoraConfig",
    "ModelConfig",
    "OneTaskConfig",
    "RolloutConfig",
    "RuntimeConfig",
    "SGLangConfig",
    "TaskConfig",
    "TlsConfig",
    "TrainerConfig",
    "UnusedName",
    "WarmStartConfig",
    "WeightsConfig",
    "load_config",
    "parse_config",
]
