"""The section [rollout.sglang]: servers, launched or attached to. Pure; waits for nothing."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from ratchet.config.section import Positive, PositiveFloat, Section


class SGLangConfig(Section):
    """The servers of each engine: launched by its worker, unless `servers` names running ones."""

    command: tuple[str, ...] = ()
    """What starts a server; arguments follow. Empty is this interpreter with
    `-m sglang.launch_server`.
    """
    tp: Positive = 1
    """Tensor-parallel ranks of a launched server."""
    args: tuple[str, ...] = ()
    """Further arguments of a launched server, as they are."""
    servers: tuple[str, ...] = ()
    """URLs of running servers to attach to, "http://host:port"; none is launched."""
    router: str | None = None
    """URL of a router in front of `servers`: generation goes there, control to each server."""
    api_key_file: str | None = None
    """A file of mode 0600 with the key of generation."""
    admin_key_file: str | None = None
    """A file of mode 0600 with the key of control (pause, flush, update); by default the api's."""
    start_timeout_s: PositiveFloat = 600.0
    """A launched server that takes longer to respond is a failed start."""
    request_timeout_s: PositiveFloat = 600.0
    """A generation that takes longer fails; waiting for weights does not count."""
    control_timeout_s: PositiveFloat = 60.0
    """A call of control that takes longer fails."""
    health_s: PositiveFloat = 5.0
    """Pause between two looks at each server."""
    probe_tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-3
    """Largest difference of a log probability between trainer and server after a load."""

    @field_validator("servers")
    @classmethod
    def _server_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        urls = tuple(_url(each) for each in value)
        if len(set(urls)) < len(urls):
            msg = f"{list(value)!r} names a server twice"
            raise ValueError(msg)
        return urls

    @field_validator("router")
    @classmethod
    def _router_url(cls, value: str | None) -> str | None:
        return None if value is None else _url(value)

    @model_validator(mode="after")
    def _one_origin(self) -> Self:
        if self.router is not None and not self.servers:
            msg = (
                f"rollout.sglang.router = {self.router!r} needs rollout.sglang.servers: weights and"
                " pauses go to each server behind it"
            )
            raise ValueError(msg)
        if len(self.servers) > 1 and self.router is None:
            msg = (
                f"rollout.sglang.servers = {list(self.servers)!r} are several, and nothing spreads"
                " generation over them: give rollout.sglang.router, or one server"
            )
            raise ValueError(msg)
        if self.servers and (self.command or self.args or self.tp != 1):
            msg = (
                "rollout.sglang.servers are running already: leave out rollout.sglang.command, args"
                " and tp"
            )
            raise ValueError(msg)
        return self


def _url(value: str) -> str:
    """Return the URL without a slash at its end."""
    try:
        parts = urlsplit(value)
        ok = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
    except ValueError:
        ok = False
    if not ok or parts.username or parts.query or parts.fragment or parts.path not in {"", "/"}:
        msg = f'{value!r} is not a server\'s URL, such as "http://127.0.0.1:30000"'
        raise ValueError(msg)
    return value.rstrip("/")
