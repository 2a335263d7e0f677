"""Whether two nodes mean the same run. Pure: consumes two configurations, produces differences."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from ratchet.config import Config
from ratchet.errors import ConfigError

_LOCAL: Final = ("name", "runtime")
"""What may differ from node to node: how the run is called there, addresses, files, patience."""
_FILLED_IN: Final = "task.fingerprint"
"""Only nodes that have built the task know it: it differs where both of them have one."""
_MISSING: Final = "(not set)"


def check_same(config: Config, theirs: str, *, whose: str) -> None:
    """Refuse to join with another configuration.

    Args:
        config: of this node.
        theirs: the other one, as TOML.
        whose: for people, such as "the registry".

    Raises:
        ConfigError: naming each field that differs, with both values.
    """
    lines = list(differences(config.to_toml(), theirs))
    if lines:
        listed = "\n  ".join(
            f"{field} is {ours} here and {other} there" for field, ours, other in lines
        )
        msg = (
            f"this configuration is not that of {whose}; all nodes of a run need the same one,"
            f" except for runtime:\n  {listed}"
        )
        raise ConfigError(msg)


def differences(ours: str, theirs: str) -> Iterator[tuple[str, str, str]]:
    """Yield each field in which two resolved configurations (TOML) differ, with both values."""
    left, right = (dict(_flat(tomllib.loads(text))) for text in (ours, theirs))
    for field in sorted(left.keys() | right.keys()):
        if field.partition(".")[0] in _LOCAL or left.get(field) == right.get(field):
            continue
        if field == _FILLED_IN and not (left.get(field) and right.get(field)):
            continue
        yield field, _shown(left, field), _shown(right, field)


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _shown(data: Mapping[str, Any], field: str) -> str:
    return repr(data[field]) if field in data else _MISSING
