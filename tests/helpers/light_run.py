"""A run whose processes are all there, and whose trainer and engines have no model to load.

For tests of processes: a role with a real model takes seconds to import what runs it, each time
that it starts. Registry, buffer, links, ledgers, checkpoints and the weight transport are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.config import small_config

from ratchet.backends.rollout.base import SamplingParams
from ratchet.backends.rollout.fake import FakeEngine
from ratchet.backends.training.fake import FakeBackend
from ratchet.config import Config

STEP_S = 0.1
"""A step of training: about what the small model takes, so that a run can be caught in it."""
COMPLETION_S = 0.02


class DigitEngine(FakeEngine):
    """Completions of digits, of the right length half of the time: rewards differ in a group."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(str(token % 10) for token in token_ids)


def create_engine(config: Config, model_dir: Path) -> FakeEngine:
    """A factory as a user's: `rollout.backend = "tests.helpers.light_run:create_engine"`."""
    del config, model_dir

    def length(prompt_ids: Sequence[int], params: SamplingParams) -> int:
        return len(prompt_ids) - 1 + params.seed % 2  # the prompt ends with a mark

    return DigitEngine(delay_s=lambda *_: COMPLETION_S, stop_after=length)


def create_backend(config: Config, model_dir: Path) -> FakeBackend:
    """A factory as a user's: `trainer.backend = "tests.helpers.light_run:create_backend"`."""
    del config, model_dir
    return FakeBackend(forward_backward_s=STEP_S)


def light_config(**sections: dict[str, Any]) -> Config:
    """Return `small_config` without a model; sections are merged over it."""
    own: dict[str, dict[str, Any]] = {
        "model": {
            "build": None,
            "path": str(Path(__file__).with_name("light_model")),
            "tokenizer_chars": "0123456789>",
        },
        "rollout": {"backend": f"{__name__}:{create_engine.__name__}"},
        "trainer": {"backend": f"{__name__}:{create_backend.__name__}"},
    }
    return small_config(
        **{name: own.get(name, {}) | sections.get(name, {}) for name in own | sections}
    )
