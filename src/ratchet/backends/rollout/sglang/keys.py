"""The keys of SGLang servers: from files of mode 0600, to the Bearer header of a call.

Consumes paths, produces keys; waits for the disk only. A key never stands in argv, the environment,
a log or an error.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ratchet.config.sglang import SGLangConfig
from ratchet.errors import ConfigError
from ratchet.transport.mailbox.credentials import read_private

_RECIPE: Final = (
    'make one: umask 077; python -c "import secrets; print(secrets.token_hex(32))" > FILE'
)
_KEY: Final = re.compile(rb"[A-Za-z0-9._~+/][A-Za-z0-9._~+/=-]{15,}")


class Keys(NamedTuple):
    """What a client shows, and a launched server asks for."""

    api: str | None
    """for generation and what is read"""
    admin: str | None
    """for control; None is the api's"""


def read_keys(config: SGLangConfig) -> Keys:
    """Read the files that the configuration names.

    Raises:
        ConfigError: if one is not a private file with one key; the text does not show the key.
    """
    return Keys(
        _read_key(config.api_key_file, "rollout.sglang.api_key_file"),
        _read_key(config.admin_key_file, "rollout.sglang.admin_key_file"),
    )


def _read_key(path: str | None, field: str) -> str | None:
    if path is None:
        return None
    key = read_private(path, field, _RECIPE).strip()
    if _KEY.fullmatch(key) is None:
        msg = (
            f"{field} = {path!r} does not hold one key of at least 16 of the characters A-Z a-z 0-9"
            f" . _ ~ + / - =, the first of them no - or =; {_RECIPE}"
        )
        raise ConfigError(msg)
    return key.decode("ascii")
