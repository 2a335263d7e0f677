from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.tiny_models import write_tiny_model

from ratchet.backends.models import (
    build_model,
    char_tokenizer,
    load_model,
    save_model_directory,
)
from ratchet.backends.rollout import _kv_cache
from ratchet.backends.rollout._batch import Batch
from ratchet.backends.rollout.base import RolloutEngine, SamplingParams
from ratchet.backends.rollout.torch import TorchEngine, create_engine
from ratchet.config import LoraConfig, parse_config
from ratchet.errors import ConfigError, GenerationFailed, WeightsMismatch

SHORT = SamplingParams(max_tokens=5, temperature=1.0, seed=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("torch") / "model")


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(bounded())


def test_it_is_a_rollout_engine(directory: Path) -> None:
    engine: RolloutEngine = TorchEngine(directory)
    assert engine.version is None
    assert engine.stats() == (0.0, 0.0, 0, 0, 0)


def test_create_engine_takes_everything_from_the_configuration(directory: Path) -> None:
    config = parse_config(
        {
            "model": {"path": str(directory), "dtype": "bfloat16"},
            "task": {"name": "copy"},
            "rollout": {"max_tokens": 4, "max_batch_size": 3},
            "buffer": {"batch_groups": 2},
            "trainer": {"num_steps": 1},
            "runtime": {"threads": 1},
        }
    )

    async def scenario() -> None:
        engine = create_engine(config, directory)
        await engine.start()
        assert {spec.dtype for spec in engine.specs()} == {"bfloat16"}
        await engine.stamp(0)
        tasks = [asyncio.create_task(engine.generate([5], SHORT)) for _ in range(8)]
        while not all(task.done() for task in tasks):
            assert engine.stats().running <= 3
            await asyncio.sleep(0)
        await engine.close()

    run(scenario())


def test_specs_list_tied_names_with_the_one_that_travels(directory: Path) -> None:
    async def scenario() -> None:
        engine = TorchEngine(directory)
        await engine.start()
        specs = {spec.name: spec for spec in engine.specs()}
        assert list(specs) == list(load_model(directory, "float32").state_dict())
        assert specs["lm_head.weight"].alias_of == "model.embed_tokens.weight"
        assert [s.name for s in specs.values() if s.alias_of] == ["lm_head.weight"]
        assert specs["model.norm.weight"] == ("model.norm.weight", "float32", (32,), None)
        await engine.close()

    run(scenario())


def test_it_generates_with_what_it_adopts_as_with_what_it_copies(directory: Path) -> None:
    async def scenario() -> None:
        copying, adopting = TorchEngine(directory), TorchEngine(directory)
        results = []
        for engine in (copying, adopting):
            await engine.start()
            names = [spec.name for spec in engine.specs() if spec.alias_of is None]
            new = {
                name: tensor * 1.5
                for name, tensor in zip(names, await engine.read(names), strict=True)
            }
            assert engine.adopts == torch.device("cpu")
            await (engine.adopt(new) if engine is adopting else engine.write(new))
            assert engine.version is None
            held = dict(zip(names, await engine.read(names), strict=True))
            assert all(torch.equal(held[name], new[name]) for name in names)
            same = [held[name].data_ptr() == new[name].data_ptr() for name in names]
            assert same == [engine is adopting] * len(names)
            (tied,) = await engine.read(["lm_head.weight"])
            assert tied.data_ptr() == held["model.embed_tokens.weight"].data_ptr()
            await engine.stamp(3)
            results.append(await engine.generate([5, 6, 7], SHORT))
            with pytest.raises(
                WeightsMismatch, match=r"model\.norm\.weight is torch\.float32 \(32,\)"
            ):
                await engine.adopt({"model.norm.weight": torch.zeros(31)})
            await engine.close()
        copied, adopted = results
        assert copied.token_ids == adopted.token_ids
        logprobs = [np.frombuffer(result.logprobs.data, np.float32) for result in results]
        # kernels sum in another order where memory is aligned in another way
        assert np.allclose(*logprobs, rtol=0, atol=1e-5)
        assert TorchEngine(directory, device="cuda").adopts is None
        assert TorchEngine(directory, lora=LoraConfig()).adopts is None

    run(scenario())


def test_all_torch_work_is_on_one_thread_of_its_own(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[str, int]] = set()
    plain_step = Batch.step

    def step(self: Batch) -> Any:
        seen.add((threading.current_thread().name, torch.get_num_threads()))
        return plain_step(self)

    monkeypatch.setattr(Batch, "step", step)

    async def scenario() -> None:
        engine = TorchEngine(directory, threads=1)
        await engine.start()
        await engine.stamp(0)
        await asyncio.gather(*[engine.generate([5], SHORT) for _ in range(3)])
        await engine.close()

    run(scenario())
    names = {name for name, _ in seen}
    assert len(names) == 1
    assert threading.current_thread().name not in names


def test_only_a_retraction_takes_the_rows_away(tmp_path: Path) -> None:
    endless = write_tiny_model(tmp_path / "model", eos_token_id=[])

    async def scenario() -> None:
        engine = TorchEngine(endless)
        await engine.start()
        await engine.pause("in_place")
        await engine.stamp(0)
        tasks = [
            asyncio.create_task(engine.generate([5], SamplingParams(2000, 1.0, seed)))
            for seed in range(8)
        ]
        await asyncio.sleep(0)
        await engine.resume()
        while engine.stats().running == 0:  # noqa: ASYNC110 - totals, not events
            await asyncio.sleep(0)
        await engine.pause("in_place")
        running, waiting = engine.stats()[3:]
        assert running > 0
        await engine.pause("retract")
        assert engine.stats()[3:] == (0, running + waiting)
        await engine.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(scenario())


def test_a_step_that_raises_fails_every_call_now_and_later(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        engine = TorchEngine(directory)
        await engine.start()
        monkeypatch.setattr(Batch, "_decode", lambda _: [][1])
        await engine.pause("in_place")
        await engine.stamp(0)
        tasks = [asyncio.create_task(engine.generate([5], SHORT)) for _ in range(3)]
        await engine.resume()
        for task in tasks:
            with pytest.raises(GenerationFailed, match="engine broke: IndexError: list index"):
                await task
        assert engine.version is None
        assert engine.stats().running == 0
        for call in (engine.generate([5], SHORT), engine.pause("retract"), engine.stamp(1)):
            with pytest.raises(GenerationFailed, match="engine broke: IndexError"):
                await call
        await engine.close()

    run(scenario())


def test_calls_before_the_start_are_refused(directory: Path) -> None:
    async def scenario() -> None:
        engine = TorchEngine(directory)
        for call in (engine.generate([5], SHORT), engine.resume()):
            with pytest.raises(GenerationFailed, match="not started"):
                await call

    run(scenario())


def test_a_directory_that_cannot_be_used_is_the_users_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = TorchEngine(tmp_path / "nowhere")
        with pytest.raises(ConfigError, match=r"model\.path"):
            await engine.start()
        await engine.close()

    run(scenario())


def test_a_model_whose_cache_is_misread_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_decode = _kv_cache._decode

    def decode(store: Any, states: Any, plan: Any, places: Any) -> Any:
        return plain_decode(store, states, plan, places - 1)

    monkeypatch.setattr(_kv_cache, "_decode", decode)

    async def scenario() -> None:
        engine = TorchEngine(directory)
        with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM.*rollout\.backend"):
            await engine.start()
        await engine.close()

    run(scenario())


FOREIGN: list[dict[str, Any]] = [
    {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    {
        "model_type": "qwen3_next",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_experts": 0,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
]


@pytest.mark.parametrize("build", FOREIGN, ids=lambda build: build["model_type"])
def test_a_model_with_another_kind_of_state_is_refused(
    tmp_path: Path, build: dict[str, Any]
) -> None:
    tokenizer = char_tokenizer("abc")
    save_model_directory(build_model(build, 0, tokenizer), tokenizer, tmp_path / "model")

    async def scenario() -> None:
        engine = TorchEngine(tmp_path / "model")
        with pytest.raises(ConfigError, match=r"model\.path = .*torch engine.*rollout\.backend"):
            await engine.start()
        await engine.close()

    run(scenario())


def test_a_chat_template_wraps_the_prompt(directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat"
    path.mkdir()
    for file in directory.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}a{{ m.content }}b{% endfor %}"
        "{% if add_generation_prompt %}c{% endif %}"
    )
    (path / "tokenizer_config.json").write_text(json.dumps(settings))

    async def scenario() -> None:
        plain, chat = TorchEngine(path), TorchEngine(path, chat_template=True)
        await plain.start()
        await chat.start()
        assert chat.encode("1+2") == plain.encode("a1+2bc")
        assert chat.decode(chat.encode("1+2")) == "a1+2bc"
        await plain.close()
        await chat.close()

    run(scenario())


def test_decode_leaves_out_the_end_and_hides_nothing_else(directory: Path) -> None:
    async def scenario() -> None:
        engine = TorchEngine(directory)
        await engine.start()
        one, two = engine.encode("12")
        assert engine.decode([one, two, 1]) == "12"
        assert engine.decode([one, two]) == "12"
        # a policy must not be paid for "12" when it said something else in between
        assert engine.decode([one, 0, two, 1]) == "1<pad>2"
        assert engine.decode([one, 2, two, 1, 1]) == "1<unk>2<eos>"
        await engine.close()

    run(scenario())


def test_a_process_ends_although_the_engine_was_not_closed(directory: Path) -> None:
    script = f"""
import asyncio, pathlib, sys
import ratchet.backends.training.fsdp
from ratchet.backends.rollout.torch import TorchEngine
async def main():
    engine = TorchEngine(pathlib.Path({str(directory)!r}))
    await engine.start()
asyncio.run(main())
assert "peft" not in sys.modules  # nobody asked for an adapter
"""
    done = subprocess.run(
        [sys.executable, "-c", script], timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_step_counts_while_it_lasts(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_step, go_on = threading.Event(), threading.Event()
    step = Batch.step

    def slow(self: Batch) -> Any:
        in_step.set()
        go_on.wait()
        return step(self)

    async def scenario() -> None:
        engine = TorchEngine(directory)
        await engine.start()
        await engine.stamp(0)
        monkeypatch.setattr(Batch, "step", slow)
        task = asyncio.create_task(engine.generate([5], SHORT))
        await asyncio.to_thread(in_step.wait)
        first, second = engine.stats().busy_s, engine.stats().busy_s
        assert 0 < first < second  # else a short look would find more than its own length
        go_on.set()
        await task
        assert engine.stats().busy_s > second
        await engine.close()

    run(scenario())
