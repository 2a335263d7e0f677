"""Warm start (SFT): the data of it.

Consumes prompts and their references, produces rows in a shuffled, endless stream of batches; waits
for nothing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from ratchet.algorithms.packing import Row, reference_row
from ratchet.backends.models import encode_prompt
from ratchet.errors import ConfigError
from ratchet.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def reference_rows(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, *, chat_template: bool
) -> list[Row]:
    """Return a row for each prompt that trains its reference and the end of sequence.

    Raises:
        ConfigError: if there is no prompt, a prompt without a reference, or no end of sequence.
    """
    if not prompts:
        msg = "warm_start.steps is set, but the task has no prompts to train on; set it to 0"
        raise ConfigError(msg)
    eos: int | None = tokenizer.eos_token_id
    if eos is None:
        msg = "warm_start.steps is set, but the tokenizer has no eos_token to end a reference with"
        raise ConfigError(msg)
    rows = []
    for prompt in prompts:
        if prompt.reference is None:
            msg = (
                f"warm_start.steps is set, but prompt {prompt.prompt_id!r} has no reference to"
                " train on; set it to 0, or use a task that gives references"
            )
            raise ConfigError(msg)
        completion = tokenizer.encode(prompt.reference, add_special_tokens=False)
        prompt_ids = encode_prompt(tokenizer, prompt.text, chat_template=chat_template)
        rows.append(reference_row(prompt_ids, [*completion, eos]))
    return rows


def shuffled_batches(rows: Sequence[Row], batch_size: int, seed: int) -> Iterator[list[Row]]:
    """Yield batches for ever: every row once in each pass, in an order from the seed."""
    order = random.Random(f"warm_start/{seed}")  # noqa: S311 - an order, not a secret

    def passes() -> Iterator[Row]:
        while True:
            yield from order.sample(rows, len(rows))

    stream = passes()
    while True:
        yield list(itertools.islice(stream, batch_size))
