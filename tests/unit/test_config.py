from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config

from ratchet.config import Config, load_config, parse_config
from ratchet.errors import ConfigError

RECIPES = Path(__file__).parents[2] / "recipes"

MINIMAL: dict[str, Any] = {
    "model": {"build": {"model_type": "qwen3"}, "tokenizer_chars": "01"},
    "task": {"name": "copy"},
    "rollout": {"max_tokens": 5},
    "buffer": {"batch_groups": 4},
    "trainer": {"num_steps": 3},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(parse_config(MINIMAL).to_toml())
    return path


def test_the_resolved_file_gives_the_same_configuration() -> None:
    config = parse_config(MINIMAL)
    assert parse_config(tomllib.loads(config.to_toml())) == config
    assert "max_staleness = 4" in config.to_toml()


def test_overrides_are_toml_or_text(file: Path) -> None:
    config = load_config(
        file, ["trainer.num_steps=7", "buffer.unused=retry", "trainer.betas=[0.8, 0.9]"]
    )
    assert (config.trainer.num_steps, config.buffer.unused) == (7, "retry")
    assert config.trainer.betas == (0.8, 0.9)


def test_an_adapter_is_asked_for_by_its_section(file: Path) -> None:
    assert load_config(file).model.lora is None
    lora = load_config(file, ["model.lora={}"]).model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.target_modules) == (16, 32, "all-linear")
    config = load_config(file, ["model.lora.target_modules=['q_proj', 'v_proj']"])
    assert config.model.lora is not None
    assert config.model.lora.target_modules == ("q_proj", "v_proj")
    assert parse_config(tomllib.loads(config.to_toml())) == config


def test_the_name_comes_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sums.toml"
    text = parse_config(MINIMAL).to_toml().replace('name = "run"\n', "")
    path.write_text(text)
    assert load_config(path).name == "sums"


def test_it_cannot_be_changed() -> None:
    config = parse_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.group_siz=3", ["'rollout.group_siz'", "did you mean 'group_size'"]),
        ("rollouts.group_size=3", ["'rollouts'", "did you mean 'rollout'"]),
        ("rollout.xyz=3", ["'rollout.xyz'", "known here", "max_tokens"]),
        ("rollout.group_size='x'", ["rollout.group_size = 'x'", "integer"]),
        ("seed=1.5", ["seed = 1.5", "integer"]),
        ("trainer.lr=0", ["trainer.lr = 0", "greater than 0"]),
        ("trainer.lr=nan", ["trainer.lr = nan", "finite"]),
        ("buffer.capacity_factor=1e400", ["buffer.capacity_factor = inf", "finite"]),
        ("trainer.betas=[0.9, 1.0]", ["trainer.betas", "1.0", "less than 1"]),
        ("seed=10000000000000000000", ["seed = 10000000000000000000", "less than or equal"]),
        ("rollout.group_size=1", ["rollout.group_size = 1", "std", "at least 2"]),
        ("buffer.capacity_factor=0.5", ["0.5", "= 2 groups", "batch of 4", "at least 1"]),
        ("weights.pause_mode=abort", ["weights.pause_mode", "abort", "in_place", "retract"]),
        ("runtime.host=10.0.0.1", ["runtime.host", "10.0.0.1", "127.0.0.1", "runtime.token_file"]),
        ("runtime.host=::", ["runtime.host", "'::'", "every interface"]),
        ("runtime.heartbeat_s=9", ["runtime.heartbeat_s = 9", "suspect_s = 5", "grow"]),
        ("runtime.host=example.org", ["runtime.host", "example.org", "127.0.0.1"]),
        ("rollout.group_timeout_s=500", ["500", "buffer.lease_s", "180"]),
        ("model.path=x", ["exactly one", "model.path", "model.build"]),
        ("model.lora.rank=0", ["model.lora.rank = 0", "greater than 0"]),
        ("model.lora.alpha=0.5", ["model.lora.alpha = 0.5", "integer"]),
        ("model.lora.ranks=4", ["'model.lora.ranks'", "did you mean 'rank'"]),
        ("model.lora.dropout=0.1", ["model.lora", "dropout = 0.1", "engines", "use 0"]),
        ("model.lora.target_modules=q_proj", ["model.lora.target_modules", "'q_proj'", "list"]),
        ("model.lora.target_modules=[]", ["model.lora.target_modules", "[]", "all-linear"]),
        ("model.lora.target_modules=[1]", ["model.lora.target_modules", "[1]", "all-linear"]),
        ("model.lora.target_modules=['']", ["model.lora.target_modules", "['']", "all-linear"]),
        ("name=../up", ["name", "'../up'"]),
        ("buffer.max_staleness=-1", ["buffer.max_staleness = -1"]),
        ("buffer.batch_filter=mine", ["buffer.batch_filter", "'mine'", "module:function"]),
        ("buffer.filters=['zero']", ["buffer.filters", "'zero'", "zero_spread", "module:function"]),
        ("buffer.filters=['truncated', 'truncated']", ["buffer.filters", "'truncated'", "twice"]),
        ("buffer.filters=['too_long']", ["max_tokens = None", "'too_long' is in", "both"]),
        ("buffer.filters=['too_short']", ["min_tokens = None", "'too_short' is in", "both"]),
        ("buffer.min_tokens=3", ["min_tokens = 3", "'too_short' is not in", "both or neither"]),
        ("buffer.drop_zero_spread=true", ["'buffer.drop_zero_spread'", "known here"]),
        ("buffer.unused=later", ["buffer.unused", "'later'", "drop, retry, mask", "function"]),
        (
            "buffer={batch_groups=4, filters=['too_short','too_long'], min_tokens=3, max_tokens=2}",
            ["min_tokens = 3", "max_tokens = 2", "every group"],
        ),
    ],
)
def test_a_mistake_names_the_field_the_value_and_the_way_out(
    file: Path, override: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert all(word in str(caught.value) for word in words), caught.value


def test_several_mistakes_are_told_at_once(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["seed=-1", "rollout.a=1"])
    assert "seed" in str(caught.value)
    assert "rollout.a" in str(caught.value)


@pytest.mark.parametrize("override", ["seed", "=3", "seed.deep=3", ".x=1"])
def test_a_malformed_override_is_refused(file: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load_config(file, [override])


def test_a_missing_section_is_named() -> None:
    data = copy.deepcopy(MINIMAL)
    del data["trainer"]
    with pytest.raises(ConfigError, match="trainer is missing"):
        parse_config(data)


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml: No such file"):
        load_config(tmp_path / "nothing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("a = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(broken)


def test_rewards_without_a_spread_cannot_be_the_rule(file: Path) -> None:
    alone = ["rollout.group_size=1", "algorithm.advantage=mean"]
    load_config(file, alone)
    with pytest.raises(ConfigError, match=r"group_size = 1 cannot go with \"zero_spread\""):
        load_config(file, [*alone, "buffer.filters=['zero_spread']"])


def test_groups_per_worker_fill_the_capacity() -> None:
    config = Config.model_validate(
        parse_config({**MINIMAL, "rollout": {"max_tokens": 5, "num_workers": 3}}).model_dump()
    )
    assert config.buffer.capacity == 8
    assert config.groups_per_worker == 3


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.stem)
def test_every_recipe_is_valid(recipe: Path) -> None:
    assert load_config(recipe).name == recipe.stem


def test_an_evaluation_beside_training_needs_prompts_and_ends_before_the_run_gives_up() -> None:
    with pytest.raises(ConfigError, match=r"eval: eval\.every_steps = 5 has nothing to evaluate"):
        small_config(eval={"every_steps": 5})
    beside = {"num_prompts": 3, "every_steps": 5, "timeout_s": 200.0}
    with pytest.raises(ConfigError, match=r"rollout\.group_timeout_s = 320\.0 is longer than"):
        small_config(eval=beside)
    assert small_config(eval=beside | {"engines": "own"}).eval.num_workers == 1
    assert small_config(eval=beside | {"every_steps": 0}).eval.engines == "shared"


def test_by_sample_the_slots_are_a_batch_and_the_rest_of_the_buffer_is_for_more() -> None:
    def slots(**rollout: Any) -> int:
        return small_config(
            rollout={"num_workers": 2, **rollout}, buffer={"batch_groups": 6, "capacity_factor": 2}
        ).groups_per_worker

    assert (slots(), slots(submission="sample")) == (6, 3)
    assert slots(submission="sample", max_concurrent_groups=5) == 5
    with pytest.raises(ConfigError, match=r"would change nothing: .* 6 x 2 = 12 .* room for 12, "):
        slots(submission="sample", max_concurrent_groups=6)
