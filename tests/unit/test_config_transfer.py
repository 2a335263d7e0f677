from __future__ import annotations

from typing import Any

import pytest
from tests.helpers.config import small_config

from ratchet.config import Config
from ratchet.errors import ConfigError


def config(
    sglang: dict[str, Any] | None = None, weights: dict[str, Any] | None = None, **sections: Any
) -> Config:
    rollout = {"backend": "sglang", "sglang": sglang or {}}
    return small_config(**{"rollout": rollout, "weights": weights or {}} | sections)


def test_nccl_reaches_servers_directly_and_gloo_through_the_worker() -> None:
    assert config().effective_weights.transport == "broadcast"
    assert config(weights={"backend": "gloo"}).effective_weights.transport == "broadcast"
    direct = config(weights={"backend": "nccl", "timeout_s": 7.0})
    assert direct.effective_weights.transport == "direct"
    assert direct.effective_weights.timeout_s == 7.0
    assert direct.weights.transport == "broadcast"


def test_the_choice_is_the_users() -> None:
    gloo, nccl = {"backend": "gloo"}, {"backend": "nccl"}
    assert config({"transfer": "direct"}, gloo).effective_weights.transport == "direct"
    assert config(weights=gloo | {"transport": "direct"}).effective_weights.transport == "direct"
    assert config({"transfer": "relay"}, nccl).effective_weights.transport == "broadcast"


def test_adapters_never_go_directly() -> None:
    lora = {"model": {**small_config().model.model_dump(mode="json"), "lora": {"rank": 2}}}
    assert config(weights={"backend": "nccl"}, **lora).effective_weights.transport == "broadcast"
    with pytest.raises(ConfigError, match=r"\[model.lora\]"):
        config({"transfer": "direct"}, {"backend": "gloo"}, **lora)


@pytest.mark.parametrize(
    ("sglang", "weights", "text"),
    [
        ({"transfer": "direct"}, {}, 'say "nccl"'),
        ({"transfer": "relay"}, {"backend": "gloo", "transport": "direct"}, "leave one"),
        ({"transfer": "direct"}, {"backend": "gloo", "transport": "my:own"}, "my:own"),
        ({"transfer": "direct", "args": ["--device", "cpu"]}, {"backend": "nccl"}, "gloo"),
    ],
)
def test_what_cannot_work_is_refused(
    sglang: dict[str, Any], weights: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        config(sglang, weights)


def test_engines_without_servers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.backend = 'torch'"):
        small_config(weights={"transport": "direct"})
    own = small_config(rollout={"backend": "my:engine"}, weights={"transport": "direct"})
    assert own.effective_weights.transport == "direct"
