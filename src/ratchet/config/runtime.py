"""The section [runtime]: processes, addresses, supervision. Pure; waits for nothing."""

from __future__ import annotations

import ipaddress
from typing import Literal, Self

from pydantic import field_validator, model_validator

from ratchet.config.section import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class TlsConfig(Section):
    """Mutual TLS between hosts: every node shows a certificate that the run's own authority has
    signed. All three are PEM files.
    """

    ca: str
    """certificate of the run's authority; nothing else is trusted"""
    cert: str
    """this node's certificate"""
    key: str
    """this node's private key, of mode 0600"""


class RuntimeConfig(Section):
    """Processes, addresses and supervision."""

    host: str = "127.0.0.1"
    """IP address of this machine that roles listen on; never a wildcard."""
    token_file: str | None = None
    """A file of mode 0600 with the secret of the run; every node has a copy."""
    tls: TlsConfig | None = None
    threads: Positive = 1
    """torch threads of each engine and trainer process."""
    restart_strategy: Literal["one_for_one", "one_for_all", "rest_for_one"] = "one_for_one"
    """Which rollout workers start again when one dies: it alone, all, or it and the later ones."""
    max_restarts: NonNegative = 3
    """Restarts of dead rollout workers, all of this launcher together, within any
    `restart_window_s`; one more ends its launcher, and the run if that is the launcher of the whole
    run.
    """
    restart_window_s: PositiveFloat = 60.0
    backoff_first_s: NonNegativeFloat = 0.0
    """Pause before a worker's restart; it doubles with each further one until the worker has lived
    for `restart_window_s`.
    """
    backoff_most_s: NonNegativeFloat = 10.0
    heartbeat_s: PositiveFloat = 1.0
    """Each link and each role says so often that it responds."""
    suspect_s: PositiveFloat = 5.0
    """Silence of a role after which it is suspected."""
    dead_s: PositiveFloat = 15.0
    """Silence of a role after which it counts as dead."""
    ask_timeout_s: PositiveFloat = 30.0
    registry_wait_s: PositiveFloat = 60.0
    """How long a role waits for a registry that is away, and registers again; then it fails."""

    trainer_wait_s: PositiveFloat = 600.0
    """How long the run waits, without a trainer, for another life of it or for a standby."""

    @field_validator("host")
    @classmethod
    def _one_address(cls, value: str) -> str:
        if value == "localhost":
            return "127.0.0.1"
        try:
            address = ipaddress.ip_address(value)
        except ValueError:
            msg = f"{value!r} is not an IP address of this machine, such as 127.0.0.1"
            raise ValueError(msg) from None
        if address.is_unspecified:
            msg = f"{value!r} is every interface of this machine; name the one that others reach"
            raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if not ipaddress.ip_address(self.host).is_loopback and not (self.token_file or self.tls):
            msg = (
                f"runtime.host = {self.host!r} can be reached from other machines, and nothing"
                " keeps strangers out: give runtime.token_file (a secret file of mode 0600, the"
                " same on every node) or runtime.tls (ca, cert, key), or use 127.0.0.1"
            )
            raise ValueError(msg)
        if not self.heartbeat_s < self.suspect_s < self.dead_s:
            msg = (
                f"runtime.heartbeat_s = {self.heartbeat_s}, suspect_s = {self.suspect_s} and"
                f" dead_s = {self.dead_s} must grow in this order"
            )
            raise ValueError(msg)
        if self.ask_timeout_s < self.dead_s:
            msg = (
                f"runtime.ask_timeout_s = {self.ask_timeout_s} is shorter than runtime.dead_s ="
                f" {self.dead_s}: an ask would fail before anybody knows whether its receiver lives"
            )
            raise ValueError(msg)
        return self
