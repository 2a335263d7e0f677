from __future__ import annotations

import pytest

from ratchet.backends.models import char_tokenizer, encode_prompt
from ratchet.backends.rollout._replies import encode_reply
from ratchet.errors import GenerationFailed

CHARS = "0123456789?<>uasn\n"
END = 1
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def test_without_a_template_a_reply_is_its_own_tokens() -> None:
    tokenizer = char_tokenizer(CHARS)
    ids = encode_reply(tokenizer, "<12", chat_template=False, end_ids={END})
    assert ids == tokenizer.encode("<12", add_special_tokens=False)


def test_with_a_template_turns_and_replies_are_the_whole_conversation() -> None:
    tokenizer = char_tokenizer(CHARS)
    tokenizer.chat_template = TEMPLATE
    ids = encode_prompt(tokenizer, "12?", chat_template=True)
    for turn, reply in (("7", "<"), ("35", ">u")):
        ids += [*tokenizer.encode(turn), END]  # as an engine has sampled it
        ids += encode_reply(tokenizer, reply, chat_template=True, end_ids={END})
    said = zip("uauau", ("12?", "7", "<", "35", ">u"), strict=True)
    roles = {"u": "user", "a": "assistant"}
    messages = [{"role": roles[who], "content": text} for who, text in said]
    assert ids == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def test_a_template_that_hides_turns_cannot_go_on() -> None:
    tokenizer = char_tokenizer(CHARS)
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(GenerationFailed, match="does not show the assistant's messages"):
        encode_reply(tokenizer, "<", chat_template=True, end_ids={END})
