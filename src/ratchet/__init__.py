"""Ratchet: fully asynchronous reinforcement learning of language models, as typed actors.

The public API is lazy: `import ratchet` loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Config", "Run", "join", "join_async", "load_config", "parse_config"]

if TYPE_CHECKING:
    from ratchet.config import Config, load_config, parse_config
    from ratchet.runtime.embed import join, join_async
    from ratchet.runtime.run import Run


def __getattr__(name: str) -> Any:
    if name == "Run":
        from ratchet.runtime.run import Run

        return Run
    if name in {"join", "join_async"}:
        from ratchet.runtime import embed

        return getattr(embed, name)
    if name in __all__:
        from ratchet import config

        return getattr(config, name)
    msg = f"module 'ratchet' has no attribute {name!r}"
    raise AttributeError(msg)
