"""Whether a completion gives the known answer: `task.args.score` of the tasks that have answers.

Consumes a prompt with a reference and a completion, produces 1.0 or 0.0; waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal, TypeAlias

from ratchet.errors import RewardFailed, TaskError
from ratchet.types import Prompt

ScoreName: TypeAlias = Literal["exact", "math"]
"""`exact`: the completion is the answer, white space at both ends aside. `math`: what it ends in is
mathematically equal to the answer (`ratchet.tasks.math_score`).
"""

Score: TypeAlias = Callable[[Prompt, str], float]


def find_score(name: ScoreName) -> Score:
    """Return the score of that name.

    Raises:
        TaskError: if the library that it needs is not installed.
    """
    if name == "exact":
        return exact
    if find_spec("math_verify") is None:
        msg = (
            'task.args.score = "math" needs the library math-verify, which is not installed;'
            " pip install 'ratchet-rl[math]'"
        )
        raise TaskError(msg)
    from ratchet.tasks.math_score import score

    return score


def exact(prompt: Prompt, completion: str) -> float:
    """Return 1.0 if the completion is the reference, white space at both ends aside, else 0.0.

    Raises:
        RewardFailed: if the prompt has no reference.
    """
    return float(completion.strip() == reference_of(prompt).strip())


def reference_of(prompt: Prompt) -> str:
    """Return the known answer.

    Raises:
        RewardFailed: if the prompt has none.
    """
    if prompt.reference is None:
        msg = f"the prompt {prompt.prompt_id!r} has no answer to compare with"
        raise RewardFailed(msg)
    return prompt.reference
