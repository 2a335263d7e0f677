"""What every training backend promises, run on each of them."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.helpers.training import copy_prompts, make_groups
from tests.helpers.training_backends import Harness, equal, snapshot

from ratchet.backends.models import load_model
from ratchet.backends.training.base import TrainingBackend
from ratchet.types import Packed, Rollout, RolloutGroup, WeightProbe


def test_only_the_second_half_changes_the_weights(
    harness: Harness, groups: list[RolloutGroup]
) -> None:
    async def body(backend: TrainingBackend) -> None:
        before = snapshot(backend)
        report = await backend.forward_backward(groups)
        assert report.finite
        assert "loss" in report.metrics
        assert equal(snapshot(backend), before)
        step = await backend.optimizer_step()
        assert step.applied
        assert step.metrics.keys() >= {"grad_norm", "lr"}
        assert not equal(snapshot(backend), before)

    harness.run(body)


def test_a_skipped_step_leaves_no_trace(harness: Harness, groups: list[RolloutGroup]) -> None:
    after: list[dict[str, torch.Tensor]] = []

    async def skipping(backend: TrainingBackend) -> None:
        before = snapshot(backend)
        await backend.forward_backward(make_groups(seed=5))
        await backend.skip_step()
        assert equal(snapshot(backend), before)
        await straight(backend)

    async def straight(backend: TrainingBackend) -> None:
        await backend.forward_backward(groups)
        await backend.optimizer_step()
        after.append(snapshot(backend))

    harness.run(skipping)
    harness.run(straight)
    assert equal(*after)


def test_the_halves_come_in_order(harness: Harness, groups: list[RolloutGroup]) -> None:
    async def body(backend: TrainingBackend) -> None:
        with pytest.raises(RuntimeError, match="no gradients"):
            await backend.optimizer_step()
        await backend.forward_backward(groups)
        with pytest.raises(RuntimeError, match="waiting"):
            await backend.forward_backward(groups)
        await backend.optimizer_step()
        with pytest.raises(RuntimeError, match="no gradients"):
            await backend.optimizer_step()
        await backend.skip_step()  # harmless

    harness.run(body)


def test_an_empty_batch_is_refused(harness: Harness, groups: list[RolloutGroup]) -> None:
    async def body(backend: TrainingBackend) -> None:
        with pytest.raises(ValueError, match="at least one token"):
            await backend.forward_backward([])
        await backend.forward_backward(groups)

    harness.run(body)


def with_mask(rollout: Rollout, mask: Sequence[int], **changes: Any) -> Rollout:
    return msgspec.structs.replace(rollout, loss_mask=Packed.of(mask, "uint8"), **changes)


def test_what_is_masked_counts_for_nothing(harness: Harness) -> None:
    """Neither in the loss, nor in the advantages of the others, nor in the number of tokens."""
    first, second, third = make_groups(3, 3, completion_tokens=(2, 5))
    a, b, c = first.rollouts
    size = len(a.completion_ids)
    anything = Packed.of([np.inf] + [-1.0] * (size - 1), "float32")
    ends = [0] + [1] * (size - 1)
    nothing = [0] * len(c.completion_ids)
    masked = [
        msgspec.structs.replace(
            first,
            rollouts=(
                with_mask(a, ends, behavior_logprobs=anything),
                b,
                with_mask(c, nothing, reward=1e6),
            ),
        ),
        msgspec.structs.replace(
            second, rollouts=tuple(with_mask(r, [0] * len(r.loss_mask)) for r in second.rollouts)
        ),
        third,
    ]
    plain = Packed.of([0.0] + [-1.0] * (size - 1), "float32")
    without = [
        msgspec.structs.replace(first, rollouts=(with_mask(a, ends, behavior_logprobs=plain), b)),
        third,
    ]
    found: list[tuple[Mapping[str, float], dict[str, torch.Tensor]]] = []

    async def train(groups: list[RolloutGroup], backend: TrainingBackend) -> None:
        report = await backend.forward_backward(groups)
        assert (await backend.optimizer_step()).applied
        found.append((report.metrics, snapshot(backend)))

    harness.run(partial(train, masked))
    harness.run(partial(train, without))
    (metrics, weights), (expected_metrics, expected_weights) = found
    assert metrics == expected_metrics
    assert equal(weights, expected_weights)
    if harness.kind != "fake":
        assert metrics["trained_tokens"] == sum(group.num_trained_tokens for group in masked)


def test_a_batch_of_which_all_is_masked_is_refused(harness: Harness) -> None:
    (group,) = make_groups(1, 2)
    rollouts = tuple(with_mask(r, [0] * len(r.loss_mask)) for r in group.rollouts)

    async def body(backend: TrainingBackend) -> None:
        with pytest.raises(ValueError, match="at least one token"):
            await backend.forward_backward([msgspec.structs.replace(group, rollouts=rollouts)])
        await backend.forward_backward([group])

    harness.run(body)


def test_specs_are_fixed_and_describe_what_is_read(
    harness: Harness, groups: list[RolloutGroup]
) -> None:
    async def body(backend: TrainingBackend) -> None:
        specs = backend.specs()
        assert len({spec.name for spec in specs}) == len(specs)
        for spec, tensor in zip(specs, backend.read([s.name for s in specs]), strict=True):
            assert tuple(tensor.shape) == spec.shape
            assert str(tensor.dtype) == f"torch.{spec.dtype}"
            assert not tensor.requires_grad
        await backend.forward_backward(groups)
        await backend.optimizer_step()
        assert list(backend.specs()) == list(specs)
        reverse = [spec.name for spec in reversed(specs)]
        for left, right in zip(
            backend.read(reverse), reversed(snapshot(backend).values()), strict=True
        ):
            assert torch.equal(left, right)

    harness.run(body)


def test_a_probe_is_a_function_of_the_weights_and_changes_nothing(
    harness: Harness, groups: list[RolloutGroup]
) -> None:
    """Also not what a step does after it: ranks that gathered weights for it give them back."""
    after: list[dict[str, torch.Tensor]] = []
    probes: list[WeightProbe | None] = []
    last: list[WeightProbe | None] = []

    async def train(probing: str, backend: TrainingBackend) -> None:
        for seed in range(2):
            if probing:
                before = snapshot(backend)
                probes.extend([await backend.probe(seed), await backend.probe(seed)])
                assert equal(snapshot(backend), before)
            await backend.forward_backward(groups)
            if probing:
                await backend.probe(seed)
            await backend.optimizer_step()
        last.append(await backend.probe(0))
        after.append(snapshot(backend))

    harness.run(partial(train, "probing"))
    harness.run(partial(train, ""))
    assert equal(*after)
    if harness.kind == "fake":
        assert probes == [None] * 4
        return
    first, again, other, _ = probes
    later, expected = last
    assert later == expected
    assert first is not None
    assert again == first
    assert other is not None
    assert other.token_ids != first.token_ids
    assert later is not None
    assert later.token_ids == first.token_ids
    assert later.logprobs != first.logprobs
    ids = first.token_ids.numpy().reshape(-1, first.length)
    logprobs = first.logprobs.numpy().reshape(len(ids), -1)
    assert logprobs.shape == (len(ids), first.length - 1)
    if not harness.kind.startswith("lora"):  # the first probe is of the base model
        model = load_model(harness.folder / "base", "float32")
        inputs = torch.tensor(ids, dtype=torch.long)
        with torch.no_grad():
            values = model(inputs).logits.log_softmax(-1)[:, :-1]
        values = values.gather(-1, inputs[:, 1:, None])[..., 0]
        torch.testing.assert_close(torch.tensor(logprobs), values, rtol=0.0, atol=1e-5)


def test_the_same_calls_give_the_same_weights(harness: Harness, groups: list[RolloutGroup]) -> None:
    results: list[dict[str, torch.Tensor]] = []

    async def body(backend: TrainingBackend) -> None:
        await backend.warm_start(copy_prompts(16))
        for _ in range(2):
            await backend.forward_backward(groups)
            await backend.optimizer_step()
        results.append(snapshot(backend))

    harness.run(body)
    harness.run(body)
    assert equal(*results)


def test_a_warm_start_changes_the_weights_and_says_the_loss(harness: Harness) -> None:
    async def body(backend: TrainingBackend) -> None:
        before = snapshot(backend)
        assert "loss" in await backend.warm_start(copy_prompts(16))
        assert not equal(snapshot(backend), before)

    harness.run(body)


def test_nothing_works_before_start_or_after_close(harness: Harness) -> None:
    async def main() -> None:
        backend = harness.backend()
        with pytest.raises(RuntimeError, match="not started"):
            backend.specs()
        await backend.start()
        await backend.close()
        with pytest.raises(RuntimeError, match="closed"):
            await backend.forward_backward(make_groups())
        with pytest.raises(RuntimeError, match="closed"):
            backend.read([])
        await backend.close()

    with harness.gang():
        asyncio.run(main())
