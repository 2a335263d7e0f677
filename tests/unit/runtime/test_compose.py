"""The composition root: which roles there are, and that the light ones stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.helpers.config import small_config

from ratchet.errors import UserError
from ratchet.imports import import_object
from ratchet.runtime.compose import ENGINES, TRAINERS, role_names, start_role, warm_start_prompts
from ratchet.runtime.rundir import create_run_directory
from ratchet.storage.versions import VersionStore
from ratchet.tasks.registry import build_task
from ratchet.types import RoleInfo

ROOT = Path(__file__).parents[3]


def test_the_roles_of_a_run_in_the_order_of_their_start() -> None:
    config = small_config(rollout={"num_workers": 3, "max_tokens": 5})
    assert role_names(config) == [
        ("registry", "registry"),
        ("buffer", "buffer"),
        ("trainer", "trainer-0"),
        ("rollout", "rollout-0"),
        ("rollout", "rollout-1"),
        ("rollout", "rollout-2"),
    ]


def test_workers_that_only_evaluate_are_started_where_there_is_work_for_them() -> None:
    own = {"num_prompts": 3, "engines": "own", "num_workers": 2}
    assert role_names(small_config(eval=own | {"every_steps": 5}))[-3:] == [
        ("rollout", "rollout-0"), ("evaluator", "evaluator-0"), ("evaluator", "evaluator-1"),
    ]  # fmt: skip
    assert role_names(small_config(eval=own))[-1] == ("rollout", "rollout-0")
    shared = own | {"every_steps": 5, "engines": "shared"}
    assert role_names(small_config(eval=shared))[-1] == ("rollout", "rollout-0")


@pytest.mark.parametrize("reference", [*ENGINES.values(), *TRAINERS.values()])
def test_every_known_backend_is_there(reference: str) -> None:
    assert callable(import_object(reference))


def test_a_warm_start_trains_on_the_first_prompts_and_none_without_it() -> None:
    config = small_config(warm_start={"steps": 2, "batch_size": 3})
    task = build_task(config.task, config.seed)
    assert warm_start_prompts(config, task) == list(task.prompts("train")[:6])
    assert warm_start_prompts(small_config(), task) == []


def test_a_role_with_files_of_another_run_is_refused(tmp_path: Path) -> None:
    config = small_config()
    run = create_run_directory(tmp_path / "run", config)
    VersionStore.open(run.versions, run="another").close()
    with pytest.raises(UserError):
        start_role(
            None,  # type: ignore[arg-type]  # it fails before
            RoleInfo("registry", "registry", "x"),
            config=config,
            run=run,
            run_id="mine",
            task=build_task(config.task, 0),
        )


LIGHT = """
import asyncio, random, sys, time
from pathlib import Path
from tests.helpers.actors import make_system
from tests.helpers.config import small_config
from ratchet.runtime.compose import start_role
from ratchet.runtime.rundir import create_run_directory
from ratchet.tasks.registry import build_task
from ratchet.types import RoleInfo

async def main():
    config = small_config()
    run = create_run_directory(Path(sys.argv[1]), config)
    system = make_system()
    task = build_task(config.task, 0)
    refs = []
    for name in ("registry", "buffer"):
        role = RoleInfo(name, name, "x")
        refs.append(start_role(system, role, config=config, run=run, run_id="r", task=task))
    assert all(ref.is_alive() for ref in refs)
    for ref in reversed(refs):
        await ref.stop(block=False)

asyncio.run(main())
print(*{"torch", "transformers"} & set(sys.modules))
"""


def test_a_registry_and_a_buffer_load_no_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.strip(), done.returncode) == ("", 0), done.stderr
    assert (tmp_path / "run" / "ledger.sqlite").exists()
