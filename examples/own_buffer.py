"""Choose the groups of a batch yourself: those whose rewards differ most come first.

A group whose rewards are all alike says nothing about which tokens were better. This policy trains
the most telling ones of what has finished; the others wait, and leave the buffer when they are past
`max_staleness`. The buffer keeps the groups and all the rules: a policy only names them.

    python examples/own_buffer.py [DIRECTORY] [STEPS]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import ratchet
from ratchet.types import RolloutGroup

CONFIG: dict[str, Any] = {
    "name": "own-buffer",
    "model": {
        "build": {
            "model_type": "qwen3",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 32,
            "tie_word_embeddings": True,
        },
        "tokenizer_chars": "0123456789>",
    },
    "task": {"name": "copy", "args": {"digits": 2, "num_prompts": 80, "holdout": 10}},
    "rollout": {"group_size": 8, "max_tokens": 4},
    "buffer": {"batch_groups": 8, "capacity_factor": 3.0, "custom": f"{__file__}:WidestFirst"},
    "trainer": {"num_steps": 60, "lr": 3e-3, "lr_warmup_steps": 5},
}


class WidestFirst:
    """The groups with the widest spread of rewards; the older one of two alike."""

    def __init__(self) -> None:
        self._spreads: dict[int, float] = {}
        self._mean = 0.0

    def put(self, group: RolloutGroup) -> None:
        """Measure a group once."""
        self._spreads[group.group_id] = statistics.pstdev(group.rewards)

    def get(self, num_groups: int, finished: Mapping[int, RolloutGroup]) -> Sequence[int]:
        """Choose; what is not in `finished` any more has left as stale."""
        self._spreads = {group_id: self._spreads[group_id] for group_id in finished}
        chosen = sorted(finished, key=self._spreads.__getitem__, reverse=True)[:num_groups]
        self._mean = statistics.fmean(self._spreads[group_id] for group_id in chosen)
        return chosen

    def metrics(self) -> Mapping[str, float]:
        """Each line of the run's metrics has this as `buffer/custom/spread_mean`."""
        return {"spread_mean": self._mean}


def main() -> None:
    """Train, print every tenth step, and the end."""
    directory = sys.argv[1] if len(sys.argv) > 1 else None
    config = CONFIG | {"trainer": CONFIG["trainer"] | {}}
    if len(sys.argv) > 2:
        config["trainer"]["num_steps"] = int(sys.argv[2])
    with ratchet.Run(config, directory=directory) as run:
        for metrics in run:
            if metrics["step"] % 10 == 0:
                reward, spread = metrics["reward_mean"], metrics["buffer/custom/spread_mean"]
                print(f"step {metrics['step']}: reward {reward:.2f}, spread {spread:.3f}")
        summary = run.wait()
    print(f"{summary['status']} after {summary['steps']} steps; see {run.directory.root}")


if __name__ == "__main__":
    main()
