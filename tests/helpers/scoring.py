"""What scorers of tests have in common."""

from __future__ import annotations

from collections.abc import Sequence

from ratchet.tasks.base import Conversation, Step
from ratchet.types import Prompt


class SingleTurn:
    """The multi-turn half of a `Scorer` whose task has one turn."""

    def max_turns(self, prompt: Prompt) -> int:
        del prompt
        return 1

    async def step(self, prompt: Prompt, conversation: Conversation) -> Step:
        raise AssertionError(f"{prompt.prompt_id} has one turn, and this is {conversation}")

    async def score_conversations(
        self, prompt: Prompt, conversations: Sequence[Conversation]
    ) -> list[float]:
        raise AssertionError(f"{prompt.prompt_id} has one turn, not {conversations}")
