"""Each mistake that can be seen before a run is refused; the texts name field, value, way out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.config import small_config

from ratchet.config import Config, parse_config
from ratchet.errors import ConfigError, TaskError
from ratchet.runtime.prepare import check_role, check_run, with_fingerprint
from ratchet.tasks.base import Split
from ratchet.types import Prompt

CHARS = "0123456789>"


class Task:
    """A task of the user's own, as scripted by `task.args`."""

    def __init__(
        self,
        train: Sequence[Sequence[str | None]] = (("1>", "1"),),
        held_out: Sequence[str] = (),
    ) -> None:
        self._train = [Prompt(f"t{i}", str(text), reference=r) for i, (text, r) in enumerate(train)]
        self._eval = [Prompt(f"e{i}", text) for i, text in enumerate(held_out)]

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return self._train if split == "train" else self._eval

    def score(self, prompt: Prompt, completion: str) -> float:
        return 0.0


def own(args: dict[str, Any] | None = None, **sections: Any) -> Config:
    task = {"name": f"{__file__}:Task", "args": args or {}}
    return small_config(task=task, **sections)


def test_a_configuration_without_mistakes_gives_its_task() -> None:
    task = check_run(small_config())
    assert len(task.prompts("train")) == 400
    assert check_run(own(warm_start={"steps": 1})).prompts("train")[0].text == "1>"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"backend": "vllm"}}, ["rollout.backend = 'vllm'", "torch"]),
        ({"trainer": {"backend": "megatron"}}, ["trainer.backend = 'megatron'", "fsdp"]),
        ({"weights": {"transport": "pigeon"}}, ["weights.transport = 'pigeon'", "broadcast"]),
        ({"algorithm": {"name": "dqn"}}, ["algorithm.name = 'dqn'", "grpo"]),
        ({"algorithm": {"advantage": "best"}}, ["algorithm.advantage = 'best'", "mean, std"]),
        ({"eval": {"num_prompts": 101}}, ["eval.num_prompts = 101", "100 prompts"]),
        ({"rollout": {"max_tokens": 61}}, ["max_tokens = 61", "4 tokens", "context of 64"]),
        (
            {"rollout": {"max_tokens": 59, "backend": "sglang"}},
            ["max_tokens = 59 and 2 tokens that SGLang keeps", "context of 64"],
        ),
        ({"model": {"tokenizer_chars": "0123>"}}, ["tokenizer_chars", "add them"]),
        ({"model": {"chat_template": True}}, ["model.chat_template = true", "no chat template"]),
    ],
)
def test_a_mistake_in_the_configuration(sections: Any, words: Sequence[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_run(small_config(**sections))
    for word in words:
        assert word in str(caught.value)


def test_prompts_that_are_not_those_of_the_configuration_are_refused() -> None:
    args = {"train": [["1>", "1"], ["2>", "2"]]}
    pinned = with_fingerprint(own(args), check_run(own(args)))
    assert pinned.task.fingerprint
    check_run(pinned)
    check_role("buffer", pinned)
    changed = pinned.task.model_copy(update={"args": {"train": [["1>", "1"], ["2>", "3"]]}})
    for check in (check_run, partial(check_role, "buffer")):
        with pytest.raises(ConfigError, match=r"task\.fingerprint = .*take task\.fingerprint out"):
            check(pinned.model_copy(update={"task": changed}))
    with_any = changed.model_copy(update={"fingerprint": ""})
    check_run(pinned.model_copy(update={"task": with_any}))


@pytest.mark.parametrize(
    ("buffer", "field"),
    [
        ({"filters": ["no_such:own"]}, "buffer.filters"),
        ({"unused": "no_such:own"}, "buffer.unused"),
        ({"custom": "no_such:own"}, "buffer.custom"),
    ],
)
def test_the_buffers_own_code_is_imported_where_it_will_run(buffer: Any, field: str) -> None:
    config = small_config(buffer=buffer)
    for check in (check_run, partial(check_role, "buffer")):
        with pytest.raises(ConfigError, match=rf"{field}: 'no_such:own'.* PYTHONPATH"):
            check(config)
    check_role("rollout", config)
    check_role("registry", config)


def test_the_batch_filter_is_imported_where_it_will_run() -> None:
    config = small_config(buffer={"batch_filter": "no_such:own"})
    for check in (check_run, partial(check_role, "trainer")):
        with pytest.raises(ConfigError, match=r"buffer\.batch_filter: 'no_such:own'.* PYTHONPATH"):
            check(config)
    check_role("rollout", config)
    check_role("buffer", config)


def test_a_prompt_that_just_fits_is_taken() -> None:
    check_run(small_config(rollout={"max_tokens": 60}))


@pytest.mark.parametrize(
    ("args", "sections", "words"),
    [
        ({"train": []}, {}, ["no training prompts", "task.args"]),
        ({"held_out": ["1>"]}, {}, ["'1>'", "in both splits"]),
        ({"held_out": ["x>"]}, {}, ["'e0'", "'x'"]),
        ({"held_out": ["1" * 60]}, {}, ["'e0' has 60 tokens"]),
        (
            {"train": [["1>", "1"], ["2>", None]]},
            {"warm_start": {"steps": 1, "batch_size": 2}},
            ["warm_start.steps = 1", "'t1'", "set it to 0"],
        ),
        (
            {"train": [["1>", "1"], ["2>", "two"]]},
            {"warm_start": {"steps": 2, "batch_size": 1}},
            ["reference of prompt 't1'", "'otw'", "model.tokenizer_chars"],
        ),
    ],
)
def test_a_mistake_in_the_task(args: Any, sections: Any, words: Sequence[str]) -> None:
    with pytest.raises((TaskError, ConfigError)) as caught:
        check_run(own(args, **sections))
    for word in words:
        assert word in str(caught.value)


def test_only_the_references_that_a_warm_start_uses_are_needed() -> None:
    train = [["1>", "1"], ["2>", None]]
    check_run(own({"train": train}, warm_start={"steps": 1, "batch_size": 1}))
    check_run(own({"train": train}))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "holds no config.json; give a local"),
        ("not json", "config.json is not a Hugging Face configuration"),
        ("[1]", "config.json is not a Hugging Face configuration"),
    ],
)
def test_a_model_directory_that_is_none(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    data = json.loads(small_config().model_dump_json(exclude_none=True))
    data["model"] = {"path": str(tmp_path)}
    with pytest.raises(ConfigError, match=words):
        check_run(parse_config(data))


def test_an_adapter_needs_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    build = small_config().model.model_dump(exclude_none=True)
    config = small_config(model=build | {"lora": {}})
    check_run(config)
    monkeypatch.setitem(sys.modules, "peft", None)
    check_run(small_config())
    with pytest.raises(ConfigError, match=r"install ratchet-rl\[lora\]"):
        check_run(config)


def test_the_launcher_stays_light() -> None:
    code = (
        "import sys; from tests.helpers.config import small_config;"
        "from ratchet.runtime.prepare import check_run; check_run(small_config());"
        "print(*{'torch', 'transformers', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"torch", "transformers"} & set(done.stdout.split())


class BrokenTask(Task):
    """Fails when it is asked for prompts."""

    def prompts(self, split: Split) -> Sequence[Prompt]:
        if split == "train":
            return super().prompts(split)
        sys.exit(0)


class EndlessTask(Task):
    """Gives what has no length."""

    def prompts(self, split: Split) -> Any:
        return iter(super().prompts(split))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("BrokenTask", r"prompts\('eval'\) failed: SystemExit: 0"),
        ("EndlessTask", r"prompts\('train'\) is no sequence"),
    ],
)
def test_a_task_whose_prompts_cannot_be_had_is_named(name: str, says: str) -> None:
    for kind in ("buffer", "rollout"):
        with pytest.raises(TaskError, match=rf"{name}': {says}"):
            check_role(kind, small_config(task={"name": f"{__file__}:{name}", "args": {}}))
