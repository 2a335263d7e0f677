from __future__ import annotations

from pathlib import Path

import pytest

from ratchet.config import load_config
from ratchet.tasks.problems import check_task
from ratchet.tasks.registry import build_task

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))


def test_there_are_recipes() -> None:
    assert {"copy", "arithmetic", "smollm2"} <= {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_loads_and_its_model_can_say_every_answer(path: Path) -> None:
    config = load_config(path)
    task = build_task(config.task, config.seed)
    assert check_task(task).num_eval >= config.eval.num_prompts > 0
    if config.model.tokenizer_chars is None:
        return
    for split in ("train", "eval"):
        for prompt in task.prompts(split):
            assert prompt.reference is not None
            assert set(prompt.text + prompt.reference) <= set(config.model.tokenizer_chars)
            assert len(prompt.reference) + 1 <= config.rollout.max_tokens  # and its end
