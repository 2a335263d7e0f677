import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.helpers.training import copy_prompts, make_groups, training_config, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from ratchet.algorithms.advantages import std_advantages
from ratchet.backends.models import load_model, load_tokenizer
from ratchet.backends.training.fsdp import FsdpBackend
from ratchet.backends.training.warm_start import reference_rows, shuffled_batches
from ratchet.config import Config
from ratchet.errors import ConfigError
from ratchet.types import Packed, Prompt, RolloutGroup


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(training_config(), tmp_path_factory.mktemp("base") / "model")


def run(
    base: Path, body: Callable[[FsdpBackend], Awaitable[None]], config: Config | None = None
) -> None:
    async def main() -> None:
        backend = FsdpBackend(base, config=config or training_config(), device="cpu")
        async with asyncio.timeout(60):
            await backend.start()
            try:
                await body(backend)
            finally:
                await backend.close()

    asyncio.run(main())


def weights(backend: FsdpBackend) -> dict[str, torch.Tensor]:
    names = [spec.name for spec in backend.specs()]
    return {name: value.clone() for name, value in zip(names, backend.read(names), strict=True)}


def gradients(base: Path, groups: Sequence[RolloutGroup], **trainer: int) -> torch.Tensor:
    """Return all gradients of one batch, in one vector."""
    found: list[torch.Tensor] = []

    async def body(backend: FsdpBackend) -> None:
        await backend.forward_backward(groups)
        model = backend._started._model
        found.extend(p.grad.flatten() for p in model.parameters() if p.grad is not None)

    run(base, body, training_config(trainer=trainer))
    return torch.cat(found)


def replace_rollouts(group: RolloutGroup, **changes: object) -> RolloutGroup:
    rollouts = tuple(msgspec.structs.replace(r, **changes) for r in group.rollouts)
    return msgspec.structs.replace(group, rollouts=rollouts)


@pytest.mark.parametrize("limit", [1, 12, 40])
def test_the_gradient_does_not_depend_on_the_split(base: Path, limit: int) -> None:
    groups = make_groups()
    whole = gradients(base, groups)
    assert whole.abs().max() > 1e-2
    split = gradients(base, groups, micro_batch_tokens=limit)
    torch.testing.assert_close(split, whole, rtol=0.0, atol=1e-6)


def test_the_gradient_is_that_of_a_loop_without_padding(base: Path) -> None:
    temperature, groups = 0.7, make_groups(2, 3)
    model = load_model(base, "float32")
    total, num_tokens = torch.zeros(()), 0
    for group in groups:
        advantages = std_advantages(np.array(group.rewards))
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            prompt = torch.from_numpy(rollout.prompt_ids.numpy().copy()).long()
            completion = torch.from_numpy(rollout.completion_ids.numpy().copy()).long()
            behavior = torch.from_numpy(rollout.behavior_logprobs.numpy().copy())
            logits = model(torch.cat([prompt, completion])[None]).logits[0] / temperature
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            chosen = logprobs.gather(1, completion[:, None])[:, 0]
            ratio = (chosen - behavior).exp()
            value = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            total = total - value.sum()
            num_tokens += len(completion)
    (total / num_tokens).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    found: list[torch.Tensor] = []

    async def body(backend: FsdpBackend) -> None:
        report = await backend.forward_backward(groups)
        assert report.metrics["loss"] == pytest.approx((total / num_tokens).item(), abs=1e-5)
        assert report.metrics["trained_tokens"] == num_tokens
        parameters = backend._started._model.parameters()
        found.extend(p.grad.flatten() for p in parameters if p.grad is not None)

    config = training_config(
        rollout={"temperature": temperature}, algorithm={"importance_cap": 1e6}
    )
    run(base, body, config)
    torch.testing.assert_close(torch.cat(found), expected, rtol=0.0, atol=1e-6)


def test_on_policy_the_ratio_is_one_and_entropy_is_true(base: Path) -> None:
    model = load_model(base, "float32")
    entropies = []

    def on_policy(group: RolloutGroup) -> RolloutGroup:
        rollouts = []
        for rollout in group.rollouts:
            prompt, completion = rollout.prompt_ids.numpy(), rollout.completion_ids.numpy()
            ids = torch.from_numpy(np.concatenate([prompt, completion])).long()
            with torch.no_grad():
                logprobs = model(ids[None]).logits[0].log_softmax(-1)[len(prompt) - 1 : -1]
            entropies.append(-(logprobs.exp() * logprobs).sum(-1))
            chosen = logprobs.gather(1, ids[len(prompt) :, None])[:, 0]
            packed = Packed.of(chosen.numpy(), "float32")
            rollouts.append(msgspec.structs.replace(rollout, behavior_logprobs=packed))
        return msgspec.structs.replace(group, rollouts=tuple(rollouts))

    async def body(backend: FsdpBackend) -> None:
        metrics = (await backend.forward_backward([on_policy(g) for g in make_groups()])).metrics
        assert metrics["importance_ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["importance_ratio_max"] == pytest.approx(1.0, abs=1e-5)
        assert metrics["behavior_kl"] == pytest.approx(0.0, abs=1e-6)
        assert metrics["entropy"] == pytest.approx(torch.cat(entropies).mean().item(), abs=1e-5)
        assert metrics["clip_low_share"] == metrics["clip_high_share"] == 0.0

    run(base, body)


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


def test_masked_tokens_do_not_count(base: Path) -> None:
    groups = make_groups(2)
    rollouts = tuple(
        msgspec.structs.replace(r, loss_mask=Packed("uint8", bytes(len(r.loss_mask))))
        for r in groups[0].rollouts
    )
    masked = msgspec.structs.replace(groups[0], rollouts=rollouts)

    async def body(backend: FsdpBackend) -> None:
        together = (await backend.forward_backward([masked, groups[1]])).metrics
        await backend.skip_step()
        alone = (await backend.forward_backward([groups[1]])).metrics
        assert together["trained_tokens"] == alone["trained_tokens"]
        assert together["loss"] == pytest.approx(alone["loss"], abs=1e-6)
        await backend.skip_step()
        with pytest.raises(ValueError, match="at least one token that is trained"):
            await backend.forward_backward([masked])

    run(base, body)


def test_the_entropy_bonus_reaches_the_model(base: Path) -> None:
    entropies = []

    async def body(backend: FsdpBackend) -> None:
        groups = [replace_rollouts(group, reward=1.0) for group in make_groups()]
        for _ in range(10):
            entropies.append((await backend.forward_backward(groups)).metrics["entropy"])
            assert (await backend.optimizer_step()).applied

    run(base, body, training_config(algorithm={"entropy_coef": 1.0}))
    assert entropies[-1] > entropies[0]


def test_a_good_rollout_becomes_likelier(base: Path) -> None:
    group = make_groups(1, 2, completion_tokens=(3, 3))[0]
    good, bad = (
        msgspec.structs.replace(r, reward=reward)
        for r, reward in zip(group.rollouts, (1.0, 0.0), strict=True)
    )
    group = msgspec.structs.replace(group, rollouts=(good, bad))

    def logprob(backend: FsdpBackend, rollout_index: int) -> float:
        rollout = group.rollouts[rollout_index]
        ids = np.concatenate([rollout.prompt_ids.numpy(), rollout.completion_ids.numpy()])
        tensor = torch.from_numpy(ids).long()
        with torch.no_grad():
            logits = backend._started._model(tensor[None]).logits[0]
        start = len(rollout.prompt_ids)
        chosen = logits.log_softmax(-1)[start - 1 : -1].gather(1, tensor[start:, None])
        return chosen.sum().item()

    async def body(backend: FsdpBackend) -> None:
        before = [logprob(backend, 0), logprob(backend, 1)]
        await backend.forward_backward([group])
        await backend.optimizer_step()
        assert logprob(backend, 0) > before[0]
        assert logprob(backend, 1) < before[1]

    run(base, body)


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


# --- warm start


def test_a_warm_start_learns_to_copy(base: Path) -> None:
    async def body(backend: FsdpBackend) -> None:
        report = await backend.warm_start(copy_prompts(100, digits=1))
        assert report["loss"] < 0.1
        model, tokenizer = backend._started._model, load_tokenizer(base)
        for digit in "0123456789":
            ids = torch.tensor([tokenizer.encode(f"{digit}>")])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False
            )
            assert tokenizer.decode(out[0, 2:]) == f"{digit}<eos>"

    settings = {"steps": 120, "batch_size": 32, "lr": 1e-2, "lr_warmup_steps": 10}
    run(base, body, training_config(warm_start=settings))


def test_only_the_reference_and_the_end_are_trained(base: Path) -> None:
    prompt = Prompt("a", "12>", reference="34")
    (row,) = reference_rows([prompt], load_tokenizer(base), chat_template=False)
    assert row.prompt_ids.numpy().tolist() == [4, 5, 13]
    assert row.completion_ids.numpy().tolist() == [6, 7, 1]
    assert row.loss_mask.numpy().tolist() == [1, 1, 1]


def test_every_row_once_in_each_pass_in_an_order_from_the_seed(base: Path) -> None:
    prompts = [Prompt(digit, f"{digit}>", reference=digit) for digit in "0123456789"]
    rows = reference_rows(prompts, load_tokenizer(base), chat_template=False)

    def two_passes(seed: int) -> list[int]:
        batches = shuffled_batches(rows, 4, seed)
        return [rows.index(row) for _ in range(5) for row in next(batches)]

    order = two_passes(0)
    assert sorted(order[:10]) == sorted(order[10:]) == list(range(10))
    assert order[:10] != order[10:]
    assert order == two_passes(0) != two_passes(1)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([Prompt("a7", "1>")], r"prompt 'a7' has no reference.*set it to 0"),
        ([], "no prompts"),
    ],
)
def test_a_warm_start_without_references_is_refused(
    base: Path, prompts: list[Prompt], message: str
) -> None:
    async def body(backend: FsdpBackend) -> None:
        before = weights(backend)
        with pytest.raises(ConfigError, match=message):
            await backend.warm_start(prompts)
        after = weights(backend)
        assert all(torch.equal(before[name], after[name]) for name in before)

    run(base, body, training_config(warm_start={"steps": 1}))


def test_no_warm_start_steps_change_nothing(base: Path) -> None:
    async def body(backend: FsdpBackend) -> None:
        assert await backend.warm_start([]) == {}

    run(base, body)


def test_a_warm_start_does_not_advance_the_schedule(base: Path) -> None:
    async def body(backend: FsdpBackend) -> None:
        await backend.warm_start(copy_prompts(8))
        await backend.forward_backward(make_groups())
        assert (await backend.optimizer_step()).metrics["lr"] == pytest.approx(2e-3 / 10)

    run(base, body, training_config(warm_start={"steps": 5}, trainer={"lr_warmup_steps": 10}))
