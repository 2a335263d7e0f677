"""What every training backend promises of what it writes: exports, and the state to go on from."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.gang import SecondRank
from tests.helpers.training import make_groups
from tests.helpers.training_backends import Harness, equal, snapshot

from ratchet.backends.training.base import TrainingBackend


def test_an_export_makes_a_new_directory(harness: Harness) -> None:
    async def body(backend: TrainingBackend) -> None:
        path = harness.folder / "deep" / "model"
        await backend.export(path)
        assert any(path.iterdir())
        assert [each.name for each in path.parent.iterdir()] == ["model"]  # nothing half-written
        with pytest.raises(FileExistsError):
            await backend.export(path)

    harness.run(body)


def test_two_ranks_train_and_export_an_adapter_as_one_process_does(
    second_rank: SecondRank, tmp_path: Path
) -> None:
    results: list[dict[str, torch.Tensor]] = []
    for kind, second in (("lora", None), ("lora, two ranks", second_rank)):
        harness = Harness(kind, tmp_path / kind, second)

        async def body(backend: TrainingBackend, folder: Path = harness.folder) -> None:
            for seed in range(3):
                await backend.forward_backward(make_groups(seed=seed))
                assert (await backend.optimizer_step()).applied
            await backend.export(folder / "out")
            saved = load_file(folder / "out" / "adapter_model.safetensors")
            held = {name: value for name, value in snapshot(backend).items() if name in saved}
            assert equal(held, saved)
            results.append(saved)

        harness.run(body)
    alone, together = results
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        assert value.any(), name
        torch.testing.assert_close(together[name], value, rtol=0.0, atol=1e-5)


async def step(backend: TrainingBackend, seed: int) -> None:
    await backend.forward_backward(make_groups(seed=seed))
    await backend.optimizer_step()


def test_a_restored_backend_goes_on_bit_for_bit(harness: Harness, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    states: list[dict[str, torch.Tensor]] = []

    async def first(backend: TrainingBackend) -> None:
        for seed in range(2):
            await step(backend, seed)
        states.append(snapshot(backend))
        await backend.begin_save(saved)
        for seed in range(2, 4):  # what is written is the state before these
            await step(backend, seed)
        await backend.end_save()
        states.append(snapshot(backend))

    async def second(backend: TrainingBackend) -> None:
        await step(backend, 9)
        await backend.restore(saved)
        assert equal(snapshot(backend), states[0])
        for seed in range(2, 4):
            await step(backend, seed)
        assert equal(snapshot(backend), states[1])

    harness.run(first)
    harness.run(second)
    if "two ranks" in harness.kind:  # and any other number of ranks reads it
        alone = Harness(
            harness.kind.removesuffix("two ranks").strip(", ") or "fsdp", tmp_path / "alone", None
        )

        async def body(backend: TrainingBackend) -> None:
            await backend.restore(saved)
            assert equal(snapshot(backend), states[0])

        alone.run(body)
