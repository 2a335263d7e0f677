"""Which process is told what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from tests.helpers.config import small_config

from ratchet.runtime.placement import Placement, RankSpec, RoleSpec, TlsFiles
from ratchet.transport.mailbox.address import Address
from ratchet.types import RoleInfo

CONFIG = small_config(runtime={"threads": 3})


def placement(**more: Any) -> Placement:
    return Placement(
        roles=(("registry", "registry"), ("trainer", "trainer-0"), ("rollout", "rollout-7")),
        run_dir=Path("/runs/x"),
        run_id="run-1",
        key=b"k" * 32,
        config=CONFIG.to_toml(),
        **{"registry": Address("unix", "/s/registry.sock"), **more},
    )


def test_on_one_machine_each_role_has_a_socket_of_its_name() -> None:
    placed = placement(sockets=Path("/s"))
    registry, _, rollout = (placed.spec(*role, "life") for role in placed.roles)
    assert registry.listen == registry.registry == rollout.registry == "unix:/s/registry.sock"
    assert rollout.listen == "unix:/s/rollout-7.sock"
    assert rollout.role == RoleInfo("rollout", "rollout-7", "life")
    assert (rollout.run_dir, rollout.run_id, rollout.key) == ("/runs/x", "run-1", (b"k" * 32).hex())


def test_on_many_each_role_listens_at_this_host_and_the_registry_where_all_look() -> None:
    there = Address("tcp", "10.0.0.1", 7000)
    placed = placement(registry=there, host="10.0.0.2", tls=TlsFiles("ca", "cert", "key"))
    registry, trainer, _ = (placed.spec(*role, "life") for role in placed.roles)
    assert registry.listen == "tcp:10.0.0.1:7000"
    assert trainer.registry == "tcp:10.0.0.1:7000"
    assert trainer.listen == "tcp:10.0.0.2:0"
    assert trainer.tls == TlsFiles("ca", "cert", "key")


def test_only_a_trainer_is_told_of_ranks() -> None:
    placed = placement(ranks=RankSpec(4))
    assert [placed.spec(*role, "x").ranks for role in placed.roles] == [None, RankSpec(4), None]


def test_a_spec_travels_with_the_configuration_of_its_node_and_shows_no_key() -> None:
    placed = placement(token_file=Path("/secret/token"))
    spec = placed.spec("rollout", "rollout-7", "life")
    read = msgspec.json.decode(msgspec.json.encode(spec), type=RoleSpec)
    assert read == spec
    assert read.load_config() == CONFIG
    assert read.token_file == "/secret/token"
    assert "kkkk" not in repr(placed)
