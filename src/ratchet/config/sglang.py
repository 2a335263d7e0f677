"""The section [rollout.sglang]: servers, launched or attached to. Pure; waits for nothing."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from ratchet.config.section import Positive, PositiveFloat, Section

_SETS: Final = "set by Ratchet"
_ONE: Final = "left at 1: weights go to the tensor-parallel ranks of one host; use more workers"
_OURS: Final = {
    "--config": "how Ratchet hands over the keys",
    "--api-key": "given by rollout.sglang.api_key_file, so that nobody reads it off a command line",
    "--admin-api-key": "given by rollout.sglang.admin_key_file, for the same reason",
    "--model-path": "model.path, or what model.build has made",
    "--model": "model.path, or what model.build has made",
    "--dtype": "model.dtype",
    "--tp-size": "rollout.sglang.tp",
    "--tensor-parallel-size": "rollout.sglang.tp",
    "--enable-lora": "given by [model.lora]",
    "--max-lora-rank": "given by [model.lora]",
    "--lora-target-modules": "given by [model.lora]",
    "--lora-paths": "no adapter of this run",
    "--host": _SETS,
    "--port": _SETS,
    "--nccl-port": _SETS,
    "--dist-init-addr": _SETS,
    "--weight-version": _SETS,
    "--dp-size": _ONE,
    "--data-parallel-size": _ONE,
    "--pp-size": _ONE,
    "--pipeline-parallel-size": _ONE,
    "--nnodes": _ONE,
    "--tokenizer-worker-num": "left at 1: with several, SGLang asks for no key",
    "--enable-custom-logit-processor": "refused: it runs code that a request brings"
    " (CVE-2026-7304)",
}


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
    transfer: Literal["relay", "direct"] | None = None
    """How a whole model reaches the servers: "relay" through the worker, which checks what arrived
    before a server is touched, or "direct" from the trainer's device. By default direct with
    weights.backend = "nccl", and relay otherwise. Adapters go by files.
    """
    router: str | None = None
    """URL of a router: generation goes there, control to each of `servers`, which are by default
    those that the router knows when a worker starts.
    """
    api_key_file: str | None = None
    """A file of mode 0600 with the key of generation."""
    admin_key_file: str | None = None
    """A file of mode 0600 with the key of control (pause, flush, update); by default the api's."""
    start_timeout_s: PositiveFloat = 600.0
    """A launched server that takes longer to respond is a failed start."""
    request_timeout_s: PositiveFloat = 600.0
    """A generation that takes longer, pauses of the servers included, fails; waiting here for a
    version does not count.
    """
    control_timeout_s: PositiveFloat = 60.0
    """A call of control that takes longer fails, and a bucket of weights."""
    health_s: PositiveFloat = 20.0
    """A server that should generate, and is not healthy within so long, is lost; it is looked at
    every quarter of that. The end of a launched server is heard of at once.
    """
    probe_tolerance: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Largest difference of a log probability between trainer and server after a load. By default
    0.001, 0.05 or 0.3 for weights in float32, float16 or bfloat16."""
    adapter_dir: str | None = None
    """Where LoRA adapters are written for the servers to read, each for as long as it is used; by
    default the system's directory for temporary files. Servers elsewhere need one that both see."""

    @property
    def attaches(self) -> bool:
        """Whether the servers are somebody else's."""
        return bool(self.servers) or self.router is not None

    @field_validator("args")
    @classmethod
    def _not_ours(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for argument in value:
            name = argument.partition("=")[0]
            # a shortened option is one too: --api is --api-key
            clash = next((option for option in _OURS if option.startswith(name)), None)
            if name.startswith("--") and clash is not None:
                msg = f"{argument!r} cannot be given: {clash} is {_OURS[clash]}"
                raise ValueError(msg)
        return value

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
        if len(self.servers) > 1 and self.router is None:
            msg = (
                f"rollout.sglang.servers = {list(self.servers)!r} are several, and nothing spreads"
                " generation over them: give rollout.sglang.router, or one server"
            )
            raise ValueError(msg)
        if self.attaches and (self.command or self.args or self.tp != 1):
            msg = (
                "rollout.sglang.servers, and those behind a router, are running already: leave out"
                " rollout.sglang.command, args and tp"
            )
            raise ValueError(msg)
        strange = [url for url in (*self.servers, self.router) if url and not _is_loopback(url)]
        if strange and self.api_key_file is None:
            msg = (
                f"rollout.sglang: {strange[0]!r} is on another host, and nothing keeps strangers"
                " from its weights: give rollout.sglang.api_key_file, the server's --api-key"
            )
            raise ValueError(msg)
        return self


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
