"""Every door of launched roles is known, and none is open to every interface; see also test_run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.command import json_lines
from tests.helpers.doors import are_loopback, doors
from tests.helpers.launched import Launched, Site
from tests.helpers.light_run import light_config

pytestmark = pytest.mark.timeout(180)

CONFIG = light_config(trainer={"num_steps": 100_000, "lr": 1e-3})


@pytest.mark.soak
def test_launched_roles_open_one_door_each_and_the_way_for_weights(tmp_path: Path) -> None:
    def found_at(launched: Launched) -> list[tuple[str, int]]:
        return doors(launched.family())

    with Site(tmp_path, CONFIG) as site:
        registry, buffer = site.launch("registry"), site.launch("buffer")
        trainer = site.launch("trainer")
        rollout = site.launch("rollout", "--node-rank", "0")
        metrics = trainer.directory / "metrics.jsonl"
        trainer.until("a second step", lambda: len(json_lines(metrics)) >= 2)
        found = {each.directory.name: found_at(each) for each in site.launched}
    assert all(are_loopback(each) for each in found.values()), found
    assert found["registry"] == [("127.0.0.1", int(site.registry.rpartition(":")[2]))]
    assert len(found["buffer"]) == 1
    assert len(found["trainer"]) >= 2
    assert len(found["rollout"]) >= 1
    assert rollout.directory != buffer.directory != registry.directory
