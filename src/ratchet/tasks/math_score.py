"""Mathematical equality with the known answer, by math-verify: `task.args.score = "math"`, or
`task.reward = "ratchet.tasks.math_score:score"` for any task whose prompts have references.

Consumes a prompt with a reference and a completion, produces 1.0 or 0.0. Waits for sympy, which may
take for ever: `9**9**9**9` is a completion. The library's own time limit is an alarm signal, which
raises outside main threads, so it is off, and what unblocks a score is `task.reward_timeout_s`,
after which the process that computes it is killed.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from ratchet.errors import RewardFailed
from ratchet.tasks.answers import reference_of
from ratchet.types import Prompt

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limit is off


def score(prompt: Prompt, completion: str) -> float:
    r"""Return 1.0 if the last expression of the completion equals the reference, else 0.0. An
    expression is something in \boxed{}, in $...$, or a plain number; one that cannot be read or
    compared is not the answer.

    Raises:
        RewardFailed: if the prompt has no reference, or one that is no expression.
    """
    known = _known(reference_of(prompt))
    if not known:
        msg = (
            f"the answer {prompt.reference!r} of prompt {prompt.prompt_id!r} is no mathematical"
            ' expression; correct it, or use score = "exact"'
        )
        raise RewardFailed(msg)
    given = parse(completion, parsing_timeout=None)
    return float(verify(known, given, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _known(reference: str) -> list[Any]:
    # the whole of it is the answer, and bare LaTeX is read within delimiters only
    marked = "\\boxed" in reference or "$" in reference
    text = reference if marked else f"\\boxed{{{reference}}}"
    expressions: list[Any] = parse(text, parsing_timeout=None)
    return expressions
