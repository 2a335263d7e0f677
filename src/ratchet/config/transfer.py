"""How weights reach SGLang's servers, from several sections. Pure; waits for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

if TYPE_CHECKING:
    from ratchet.config.rollout import RolloutConfig
    from ratchet.config.training import WeightsConfig

Transfer: TypeAlias = Literal["relay", "direct"]

DIRECT: Final = "direct"
"""Also the name of the transport that does it."""

_FIELD: Final = 'rollout.sglang.transfer = "direct"'


def transfer_of(rollout: RolloutConfig, weights: WeightsConfig, *, lora: bool) -> Transfer:
    """Return how weights reach the servers: as configured, or "direct" where NCCL moves a whole
    model, as there the worker cannot pass it on.

    Raises:
        ValueError: if what is configured cannot work; the text says why.
    """
    chosen = rollout.sglang.transfer
    if rollout.backend != "sglang":
        if weights.transport == DIRECT and ":" not in rollout.backend:
            msg = (
                'weights.transport = "direct" cannot go with rollout.backend ='
                f" {rollout.backend!r}: its engines have no servers that weights could be sent to;"
                ' use "broadcast" or "p2p"'
            )
            raise ValueError(msg)
        return "relay"
    if chosen == "relay" and weights.transport == DIRECT:
        msg = (
            'weights.transport = "direct" cannot go with rollout.sglang.transfer = "relay": leave'
            " one of the two out"
        )
        raise ValueError(msg)
    wanted = chosen == DIRECT or weights.transport == DIRECT
    if not wanted:
        nccl = chosen is None and weights.backend == "nccl" and ":" not in weights.transport
        return DIRECT if nccl and not lora else "relay"
    _check_direct(rollout, weights, lora=lora)
    return DIRECT


def _check_direct(rollout: RolloutConfig, weights: WeightsConfig, *, lora: bool) -> None:
    if lora:
        msg = (
            f"{_FIELD} cannot go with [model.lora]: servers take an adapter from files that the"
            ' worker writes; use "relay"'
        )
        raise ValueError(msg)
    if weights.backend == "auto":
        msg = (
            f'{_FIELD} cannot go with weights.backend = "auto", which looks at the trainer\'s'
            ' devices and not at the servers\'; say "nccl" for servers on GPUs of their own, "gloo"'
            " for others"
        )
        raise ValueError(msg)
    args = " ".join(rollout.sglang.args).replace("=", " ")
    if weights.backend == "nccl" and "--device cpu" in args:
        msg = (
            f'{_FIELD} cannot go with weights.backend = "nccl" and servers with --device cpu, which'
            ' have no NCCL; use weights.backend = "gloo"'
        )
        raise ValueError(msg)
    if ":" in weights.transport:
        msg = (
            f"{_FIELD} cannot go with weights.transport = {weights.transport!r}: it is a transport"
            ' itself; leave one of the two out, or use "relay"'
        )
        raise ValueError(msg)
