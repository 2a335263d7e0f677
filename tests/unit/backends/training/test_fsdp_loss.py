"""The loss of the FSDP backend: its gradients, its metrics, and what it makes likelier."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.helpers.fsdp_runs import replace_rollouts, run
from tests.helpers.training import make_groups, training_config

from ratchet.algorithms.advantages import std_advantages
from ratchet.backends.models import load_model
from ratchet.backends.training.fsdp import FsdpBackend
from ratchet.types import Packed, RolloutGroup


def gradients(base: Path, groups: Sequence[RolloutGroup], **trainer: int) -> torch.Tensor:
    """Return all gradients of one batch, in one vector."""
    found: list[torch.Tensor] = []

    async def body(backend: FsdpBackend) -> None:
        await backend.forward_backward(groups)
        model = backend._started._model
        found.extend(p.grad.flatten() for p in model.parameters() if p.grad is not None)

    run(base, body, training_config(trainer=trainer))
    return torch.cat(found)


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
