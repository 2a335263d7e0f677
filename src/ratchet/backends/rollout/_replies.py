"""From what an environment answers to the token ids behind a turn of the policy.

Consumes a text and a tokenizer, produces ids; pure. The sampled turns before it stay the tokens
that they are, so only what a chat template writes after them is needed: it is read off a short
conversation of the same shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ratchet.errors import GenerationFailed

if TYPE_CHECKING:
    from collections.abc import Collection

    from transformers import PreTrainedTokenizerBase

_TURN: Final = "A-TURN-OF-THE-POLICY"


def encode_reply(
    tokenizer: PreTrainedTokenizerBase, text: str, *, chat_template: bool, end_ids: Collection[int]
) -> list[int]:
    """Return the ids that follow a turn which ended with one of `end_ids`.

    Raises:
        GenerationFailed: if the chat template hides what the assistant has said.
    """
    if not chat_template:
        return list(tokenizer.encode(text, add_special_tokens=False))
    messages = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": _TURN},
        {"role": "user", "content": text},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    _, found, behind = str(rendered).partition(_TURN)
    if not found:
        msg = "the chat template does not show the assistant's messages: turns cannot follow them"
        raise GenerationFailed(msg)
    ids = list(tokenizer.encode(behind, add_special_tokens=False))
    return ids[1:] if ids and ids[0] in end_ids else ids  # the policy has sampled its own end
