from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config

from ratchet.backends.rollout.sglang.keys import read_keys
from ratchet.config.sglang import SGLangConfig
from ratchet.errors import ConfigError
from ratchet.runtime.prepare import check_run

NEAR, FAR = "http://127.0.0.1:30000", "http://10.0.0.6:30000"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"args": ("--api-key", "x")}, "'--api-key' cannot be given: .*api_key_file"),
        ({"args": ("--api=x",)}, "'--api=x' cannot be given: --api-key"),
        ({"args": ("--mod", "x")}, "--model-path is model.path"),
        ({"args": ("--device", "cpu", "--tp=2")}, r"--tp-size is rollout\.sglang\.tp"),
        ({"args": ("--enable-custom-logit-processor",)}, "CVE-2026-7304"),
        ({"servers": (NEAR,), "tp": 2}, "are running already"),
        ({"router": NEAR, "args": ("--device", "cpu")}, "are running already"),
        ({"servers": (FAR,)}, f"'{FAR}' is on another host.*api_key_file"),
        ({"router": FAR, "servers": (NEAR,)}, f"'{FAR}' is on another host.*api_key_file"),
        ({"servers": (NEAR, f"{NEAR}/")}, "names a server twice"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SGLangConfig(**fields)


def test_what_can_be() -> None:
    assert not SGLangConfig(args=("--device", "cpu", "--max-running-requests", "-1")).attaches
    assert SGLangConfig(router=NEAR).attaches
    assert SGLangConfig(servers=(FAR,), api_key_file="key").attaches
    assert SGLangConfig(servers=("http://localhost:1", "http://[::1]:1"), router=NEAR).attaches


def test_servers_of_others_go_with_one_worker() -> None:
    sglang = {"backend": "sglang", "sglang": {"servers": [NEAR]}}
    check_run(small_config(rollout=sglang))
    with pytest.raises(ConfigError, match=r"go with one worker, .*makes 2"):
        check_run(small_config(rollout=sglang | {"num_workers": 2}))


def test_a_key_is_one_private_line(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    config = SGLangConfig(api_key_file=str(path))
    path.write_text("0123456789abcdef-ABC_~+/=.\n")
    assert read_keys(config) == ("0123456789abcdef-ABC_~+/=.", None)
    for bad in ("short", "-0123456789abcdef", "0123456789abcdef 1", "", "'0123456789abcdef'"):
        path.write_text(bad)
        with pytest.raises(ConfigError, match="does not hold one key") as raised:
            read_keys(config)
        assert not bad or bad not in str(raised.value)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.api_key_file = .* mode 0644"):
        read_keys(config)


@pytest.mark.parametrize("name", ["top_p", "top_k", "repetition_penalty"])
def test_what_cuts_the_distribution_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.{name} is not supported.*whole distribution"):
        small_config(rollout={"max_tokens": 5, name: 1})
