"""The warm start of the FSDP backend: it learns to copy, and touches nothing else."""

from pathlib import Path

import pytest
import torch
from tests.helpers.fsdp_runs import run, weights
from tests.helpers.training import copy_prompts, make_groups, training_config

from ratchet.backends.models import load_tokenizer
from ratchet.backends.training.fsdp import FsdpBackend
from ratchet.backends.training.warm_start import reference_rows, shuffled_batches
from ratchet.errors import ConfigError
from ratchet.types import Prompt


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
