"""The configuration of one node: the file, and what is different here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config
from tests.helpers.launched import make_token

from ratchet.config import Config
from ratchet.errors import ConfigError
from ratchet.runtime.node_config import LaunchOptions, node_config
from ratchet.transport.mailbox.address import Address
from ratchet.types import RoleKind


def resolved(root: Path, kind: RoleKind, **options: Any) -> tuple[Config, Address]:
    recipe = root / "job.toml"
    recipe.write_text(small_config(runtime={"threads": 2}).to_toml())
    return node_config(kind, recipe, LaunchOptions(**{"registry": "127.0.0.1:7000", **options}))


def test_the_file_says_what_the_options_do_not(tmp_path: Path) -> None:
    token = str(make_token(tmp_path / "token"))
    config, registry = resolved(tmp_path, "rollout", token_file=token, host="127.0.0.2")
    assert registry == Address("tcp", "127.0.0.1", 7000)
    assert (config.runtime.host, config.runtime.token_file) == ("127.0.0.2", token)
    assert config.runtime.threads == 2
    config, _ = resolved(tmp_path, "buffer", token_file=token, overrides=["runtime.threads=3"])
    assert (config.runtime.host, config.runtime.threads) == ("127.0.0.1", 3)


def test_options_come_before_the_file_and_before_overrides(tmp_path: Path) -> None:
    config, _ = resolved(
        tmp_path,
        "buffer",
        token_file="mine",
        tls={"ca": "a", "cert": 'b"c', "key": "k"},
        overrides=["runtime.token_file=theirs"],
    )
    assert config.runtime.token_file == "mine"
    assert config.runtime.tls is not None
    assert config.runtime.tls.cert == 'b"c'


def test_half_of_what_tls_needs_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.tls\.key is missing"):
        resolved(tmp_path, "buffer", tls={"ca": "a", "cert": "b"})


def test_a_registry_is_where_it_listens(tmp_path: Path) -> None:
    config, registry = resolved(
        tmp_path, "registry", registry="head:7000", host="127.0.0.3", token_file="t"
    )
    assert registry == Address("tcp", "127.0.0.3", 7000)
    assert config.runtime.host == "127.0.0.3"


def test_on_one_machine_a_user_needs_no_secret_of_his_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    config, _ = resolved(tmp_path, "buffer")
    assert config.runtime.token_file == str(tmp_path / "ratchet" / "token")


@pytest.mark.parametrize(
    "options", [{"registry": "192.0.2.1:7000"}, {"host": "192.0.2.2"}], ids=["registry", "host"]
)
def test_strangers_are_kept_out(tmp_path: Path, options: dict[str, str]) -> None:
    (option,) = options
    with pytest.raises(ConfigError, match=f"--{option} 192.0.2.*--token-file"):
        resolved(tmp_path, "rollout", **options)


def test_a_host_is_an_address(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"runtime\.host.*every interface"):
        resolved(tmp_path, "buffer", host="::", token_file="t")
    with pytest.raises(ConfigError, match="'node-1' is not an IP address"):
        resolved(tmp_path, "buffer", host="node-1", token_file="t")
