"""Text to ids and back, by the tokenizer of a model: alike in every engine. Pure; waits for
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ratchet.backends.models import encode_prompt
from ratchet.backends.rollout._replies import encode_reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase


class TextCodec(NamedTuple):
    """A tokenizer, and how an engine uses it."""

    tokenizer: PreTrainedTokenizerBase
    chat_template: bool
    end_ids: frozenset[int]
    """ids that end a completion"""

    def encode(self, text: str) -> list[int]:
        """Turn a prompt into ids."""
        return encode_prompt(self.tokenizer, text, chat_template=self.chat_template)

    def encode_reply(self, text: str) -> list[int]:
        """Turn a message of the environment into ids behind a turn of the policy."""
        return encode_reply(
            self.tokenizer, text, chat_template=self.chat_template, end_ids=self.end_ids
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn ids into text, without the end of sequence."""
        ids = list(token_ids)
        if ids and ids[-1] in self.end_ids:
            ids.pop()
        return str(self.tokenizer.decode(ids))
