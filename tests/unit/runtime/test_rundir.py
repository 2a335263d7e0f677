from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.config import small_config

from ratchet.errors import ConfigError, UserError
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.placement import TlsFiles
from ratchet.runtime.rundir import (
    Links,
    create_run_directory,
    host_run_directory,
    join_run_directory,
    read_links,
    recorded_run,
    same_address,
    write_links,
)
from ratchet.storage.versions import VersionStore
from ratchet.transport.mailbox.address import Address


def test_the_resolved_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = small_config(trainer={"num_steps": 7})
    run = create_run_directory(tmp_path / "a" / "b" / "run", config)
    assert run.logs.is_dir()
    assert sorted(path.name for path in run.root.iterdir()) == ["config.toml", "logs"]
    assert RunDirectory(run.root).load_config() == config


def test_every_file_has_a_name_of_its_own(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    names = [name for name, value in vars(RunDirectory).items() if isinstance(value, property)]
    paths = {getattr(run, name) for name in names}
    assert len(paths) == len(names) == 12
    assert {path.parent for path in paths} == {tmp_path}


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    create_run_directory(tmp_path, small_config())
    assert (tmp_path / "config.toml").exists()


def test_a_run_or_a_file_is_never_written_over(tmp_path: Path) -> None:
    create_run_directory(tmp_path / "run", small_config())
    (tmp_path / "file").write_text("mine")
    for taken in ("run", "file"):
        with pytest.raises(ConfigError, match=f"{taken} exists already.*--dir"):
            create_run_directory(tmp_path / taken, small_config(trainer={"num_steps": 99}))
    assert (tmp_path / "file").read_text() == "mine"
    assert RunDirectory(tmp_path / "run").load_config().trainer.num_steps == 3


def test_a_place_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make .*Not a directory; give another --dir"):
        create_run_directory(tmp_path / "file" / "run", small_config())


# --- the note that says how to reach a run

LINKS = Links("tcp:127.0.0.1:7000", "run-1", "/secret/token")


def test_links_are_read_back_and_never_half_written(tmp_path: Path) -> None:
    run = create_run_directory(tmp_path / "run", small_config())
    assert read_links(run) is None
    for links in (LINKS, Links("unix:/x", "run-2", tls=TlsFiles("ca", "cert", "key"))):
        write_links(run, links)
        assert read_links(run) == links
    assert sorted(path.name for path in run.root.iterdir()) == ["config.toml", "links.json", "logs"]
    run.links.write_text("{")
    with pytest.raises(UserError, match=r"links.json cannot be read.*remove it"):
        read_links(run)


# --- the directory of a node


def test_a_node_makes_its_directory_or_goes_on_in_one_of_the_same_run(tmp_path: Path) -> None:
    run, config = RunDirectory(tmp_path / "a" / "node"), small_config()
    join_run_directory(run, config, LINKS, kind="rollout")
    assert run.logs.is_dir()
    assert read_links(run) == LINKS
    elsewhere = Links("tcp:registry:7000", "run-1")  # it is called otherwise from here
    join_run_directory(run, small_config(runtime={"threads": 2}), elsewhere, kind="trainer")
    assert read_links(run) == LINKS
    assert run.load_config() == config
    assert [path.name for path in run.root.parent.iterdir()] == ["node"]


def test_a_directory_of_another_run_is_refused(tmp_path: Path) -> None:
    run, config = RunDirectory(tmp_path / "node"), small_config()
    join_run_directory(run, config, LINKS, kind="rollout")
    other = Links(LINKS.registry, "run-2")
    with pytest.raises(ConfigError, match=r"belongs to run run-1.* has run run-2; give another"):
        join_run_directory(run, config, other, kind="rollout")
    with pytest.raises(ConfigError, match=r"buffer.batch_groups is 3 here and 4 there"):
        join_run_directory(run, small_config(buffer={"batch_groups": 3}), LINKS, kind="rollout")
    # one that `ratchet run` has left: its links are gone, its versions are not
    left = create_run_directory(tmp_path / "left", config)
    VersionStore.open(left.versions, run="run-0").close()
    with pytest.raises(ConfigError, match="belongs to run run-0"):
        join_run_directory(left, config, LINKS, kind="rollout")


def test_a_role_goes_on_where_an_earlier_one_was(tmp_path: Path) -> None:
    run, config = RunDirectory(tmp_path / "node"), small_config()
    join_run_directory(run, config, LINKS, kind="rollout")
    run.metrics.write_text('{"step": 1}\n')
    run.ledger.write_text("")
    for kind in ("rollout", "trainer", "buffer"):
        join_run_directory(run, config, LINKS, kind=kind, is_trained=True)
    assert run.metrics.read_text() == '{"step": 1}\n'


def test_a_buffer_begins_no_second_ledger(tmp_path: Path) -> None:
    run, config = RunDirectory(tmp_path / "node"), small_config()
    words = r"trained already, and .*node has nothing of that.*directory of its buffer"
    with pytest.raises(ConfigError, match=words):
        join_run_directory(run, config, LINKS, kind="buffer", is_trained=True)
    assert not run.root.exists()
    join_run_directory(run, config, LINKS, kind="rollout", is_trained=True)
    with pytest.raises(ConfigError, match=words):  # of another role
        join_run_directory(run, config, LINKS, kind="buffer", is_trained=True)
    join_run_directory(run, config, LINKS, kind="buffer")


def test_what_is_no_run_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    run = RunDirectory(tmp_path / "mine")
    for act in (
        lambda: join_run_directory(run, small_config(), LINKS, kind="rollout"),
        lambda: host_run_directory(run, small_config(), ANY_PORT),
    ):
        with pytest.raises(ConfigError, match="exists already and is no run directory"):
            act()
    assert [path.name for path in run.root.iterdir()] == ["thesis.tex"]


ANY_PORT, CHOSEN = Address("tcp", "127.0.0.1", 0), Address("tcp", "127.0.0.1", 7000)


def test_a_registry_finds_the_run_that_its_directory_holds(tmp_path: Path) -> None:
    run, config = RunDirectory(tmp_path / "registry"), small_config()
    first, second = (host_run_directory(run, config, ANY_PORT) for _ in range(2))
    assert first.run_id != second.run_id  # it has never listened
    assert first.address == second.address == ANY_PORT
    write_links(run, LINKS)
    for _ in range(2):  # killed before it listens
        assert host_run_directory(run, config, ANY_PORT) == ("run-1", CHOSEN)
        assert read_links(run) is None  # until it listens again
    VersionStore.open(run.versions, run="run-1").close()
    assert recorded_run(run) == "run-1"
    other = Address("tcp", "127.0.0.1", 7001)
    assert host_run_directory(run, config, other) == ("run-1", other)
    run.links.write_text("{")
    for _ in range(2):
        with pytest.raises(UserError, match=r"links.json cannot be read.*remove it"):
            host_run_directory(run, config, ANY_PORT)
    run.links.unlink()
    with pytest.raises(ConfigError, match=r"trainer\.num_steps is 7 here and 3 there"):
        host_run_directory(run, small_config(trainer={"num_steps": 7}), ANY_PORT)


def test_a_registry_that_may_choose_its_port_keeps_it(tmp_path: Path) -> None:
    run = create_run_directory(tmp_path / "run", small_config())
    assert same_address(run, ANY_PORT) == ANY_PORT
    write_links(run, LINKS)
    assert same_address(run, ANY_PORT) == CHOSEN
    for other in (
        Address("tcp", "127.0.0.1", 7001),
        Address("tcp", "127.0.0.2", 0),
        Address("unix", "/x"),
    ):
        assert same_address(run, other) == other
