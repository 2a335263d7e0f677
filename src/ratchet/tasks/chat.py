"""The text of a prompt that was written as chat messages. Pure: consumes messages, produces text,
waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def messages_text(messages: object) -> str:
    """Return the text of a prompt: of a text itself; of chat messages, one of the user, perhaps
    behind one of the system, to which it is joined by an empty line.

    Raises:
        ValueError: if it is anything else; the text says what it is.
    """
    if isinstance(messages, str):
        return messages
    if not isinstance(messages, Sequence) or isinstance(messages, bytes) or not messages:
        msg = f"{messages!r}, neither a text nor a list of chat messages"
        raise ValueError(msg)
    said: list[tuple[object, object]] = [
        (each.get("role"), each.get("content")) if isinstance(each, Mapping) else (None, each)
        for each in messages
    ]
    roles = [role for role, _ in said]
    if roles not in (["user"], ["system", "user"]):
        msg = (
            f"a conversation of {roles}; a prompt is one message of the user, perhaps behind one of"
            " the system. Turns that follow are a task of several turns"
        )
        raise ValueError(msg)
    texts = [content for _, content in said]
    if not all(isinstance(content, str) for content in texts):
        msg = f"a message whose content is no text: {messages!r}"
        raise ValueError(msg)
    return "\n\n".join(str(content) for content in texts)
