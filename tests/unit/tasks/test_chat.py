from __future__ import annotations

import pytest

from ratchet.tasks.chat import messages_text

USER = {"role": "user", "content": "What is 1+1?"}


def test_a_prompt_is_a_text_or_what_the_user_says_behind_the_system() -> None:
    assert messages_text("1+1=") == "1+1="
    assert messages_text([USER]) == "What is 1+1?"
    assert messages_text([{"role": "system", "content": "Add."}, USER]) == "Add.\n\nWhat is 1+1?"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], r"\[\], neither a text nor a list of chat messages"),
        ([{"role": "assistant", "content": "a"}], r"a conversation of \['assistant'\]"),
        (
            [{"role": role, "content": "a"} for role in ("user", "assistant", "user")],
            "a prompt is one message of the user",
        ),
        ([{"role": "user", "content": [{"type": "image"}]}], "a message whose content is no text"),
    ],
)
def test_messages_that_are_no_single_question_are_refused(messages: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        messages_text(messages)
