import gc
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.helpers.fsdp_runs import replace_rollouts, run, weights
from tests.helpers.training import copy_prompts, make_groups, training_config
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.backends.models import load_model
from ratchet.backends.training.fsdp import FsdpBackend
from ratchet.types import Packed


@pytest.mark.parametrize("where", ["behavior_logprobs", "reward", "weight"])
def test_what_is_not_finite_is_reported_and_changes_nothing(base: Path, where: str) -> None:
    groups = make_groups()
    bad = list(groups)
    first = groups[0].rollouts[0]
    if where == "reward":
        bad[0] = replace_rollouts(groups[0], reward=float("nan"))
    elif where == "behavior_logprobs":
        nans = Packed.of(np.full(len(first.completion_ids), np.nan), "float32")
        rollouts = (msgspec.structs.replace(first, behavior_logprobs=nans),)
        bad[0] = msgspec.structs.replace(groups[0], rollouts=rollouts + groups[0].rollouts[1:])

    async def body(backend: FsdpBackend) -> None:
        parameter = backend._started._model.get_parameter("model.norm.weight")
        good_value = parameter.detach().clone()
        if where == "weight":
            parameter.data[0] = torch.inf
        before = weights(backend)
        assert not (await backend.forward_backward(bad)).finite
        assert not (await backend.optimizer_step()).applied
        after = weights(backend)
        assert all(torch.equal(before[name], after[name]) for name in before)
        parameter.data.copy_(good_value)
        assert (await backend.forward_backward(groups)).finite
        step = await backend.optimizer_step()
        assert step.applied

    run(base, body)


def test_a_failed_pass_leaves_no_gradients_behind(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(backend: FsdpBackend) -> None:
        learner = backend._started
        calls = []
        inputs = learner._passes._inputs

        def failing(batch):  # noqa: ANN001, ANN202
            calls.append(batch)
            if len(calls) == 2:
                raise MemoryError
            return inputs(batch)

        with monkeypatch.context() as patch:
            patch.setattr(learner._passes, "_inputs", failing)
            with pytest.raises(MemoryError):
                await backend.forward_backward(make_groups())
        assert all(p.grad is None for p in learner._model.parameters())
        assert (await backend.forward_backward(make_groups())).finite

    run(base, body, training_config(trainer={"micro_batch_tokens": 20}))


def test_tied_weights_travel_once(base: Path) -> None:
    async def body(backend: FsdpBackend) -> None:
        specs = {spec.name: spec for spec in backend.specs()}
        assert specs["lm_head.weight"].alias_of == "model.embed_tokens.weight"
        assert specs["model.embed_tokens.weight"].alias_of is None
        head, embedding = backend.read(["lm_head.weight", "model.embed_tokens.weight"])
        assert head.data_ptr() == embedding.data_ptr()

    run(base, body)


def test_an_export_is_the_trained_model(base: Path, tmp_path: Path) -> None:
    ids = torch.tensor([[3, 4, 5, 13, 3]])

    async def body(backend: FsdpBackend) -> None:
        await backend.forward_backward(make_groups())
        await backend.optimizer_step()
        await backend.export(tmp_path / "out")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("07>") == [3, 10, 13]
        with torch.no_grad():
            trained = backend._started._model(ids).logits
            assert torch.equal(loaded(ids).logits, trained)
            assert not torch.equal(load_model(base, "float32")(ids).logits, trained)

    run(base, body)


def test_a_failed_export_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(model: object, tokenizer: object, path: Path) -> None:
        path.mkdir()
        (path / "half").write_text("")
        assert not (tmp_path / "out").exists()
        raise OSError(28, "No space left on device")

    def files() -> list[Path]:
        return list(tmp_path.iterdir())

    async def body(backend: FsdpBackend) -> None:
        with monkeypatch.context() as patch:
            patch.setattr("ratchet.backends.training.learner.save_model_directory", failing)
            with pytest.raises(OSError, match="No space left"):
                await backend.export(tmp_path / "out")
        assert files() == []
        await backend.export(tmp_path / "out")
        assert files() == [tmp_path / "out"]

    run(base, body)


def test_a_state_that_cannot_be_written_is_told_once(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(backend: FsdpBackend) -> None:
        await backend.begin_save(tmp_path / "none")
        with pytest.raises(OSError, match="No such file"):
            await backend.end_save()

    run(base, body)
    gc.collect()  # a future whose error nobody took says so at its end
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []


def test_a_bfloat16_policy_trains(base: Path) -> None:
    async def body(backend: FsdpBackend) -> None:
        assert {spec.dtype for spec in backend.specs()} == {"bfloat16"}
        await backend.warm_start(copy_prompts(16))
        before = weights(backend)
        assert (await backend.forward_backward(make_groups())).finite
        assert (await backend.optimizer_step()).applied
        after = weights(backend)
        name = "model.layers.0.mlp.up_proj.weight"
        # one step of Adam moves a weight by about the rate: not back to before the warm start
        assert 0 < (after[name] - before[name]).abs().max() < 5e-3

    config = training_config(
        model={"dtype": "bfloat16"}, warm_start={"steps": 20, "lr": 1e-2, "lr_warmup_steps": 0}
    )
    run(base, body, config)


def test_torch_never_runs_on_the_event_loop(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    async def body(backend: FsdpBackend) -> None:
        model = backend._started._model
        forward = model.forward

        def watched(*args: object, **kwargs: object) -> object:
            threads.add(threading.current_thread().name)
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", watched)
        await backend.warm_start(copy_prompts(8))
        await backend.forward_backward(make_groups())

    run(base, body, training_config(warm_start={"steps": 2}))
    assert threads == {"training_0"}
