"""The recipes for SGLang pass `ratchet check`; those for GPUs were never run."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.helpers.tiny_models import write_tiny_model

from ratchet.config import load_config
from ratchet.runtime.prepare import check_run

RECIPES = Path(__file__).parents[3] / "recipes"


def test_the_recipe_for_a_cpu_is_the_default_job_with_another_engine() -> None:
    ours, default = (
        load_config(RECIPES / name, ["name=x", "rollout.sglang={}", "rollout.backend=torch"])
        for name in ("arithmetic-sglang.toml", "arithmetic.toml")
    )
    assert ours == default
    sglang = load_config(RECIPES / "arithmetic-sglang.toml").rollout.sglang
    assert (RECIPES.parent / sglang.command[-1]).is_file()


@pytest.mark.parametrize("name", ["qwen3-sglang", "qwen3-sglang-two-nodes"])
def test_a_recipe_for_gpus_is_accepted_and_says_that_it_was_not_run(
    name: str, tmp_path: Path
) -> None:
    path = RECIPES / f"{name}.toml"
    assert "NOT RUN" in path.read_text()
    model = write_tiny_model(tmp_path / "model")  # as long a context, and no chat template
    overrides = [f"model.path={model}", "model.chat_template=false", "task.args.size=2000"]
    check_run(load_config(path, overrides))
