"""Train with a reward of your own, and follow the steps as they come.

The reward is a plain function at the top level of this file: the rollout processes import it from
here, so everything that starts a run belongs under `if __name__ == "__main__"`.

    python examples/own_reward.py [DIRECTORY] [STEPS]
"""

from __future__ import annotations

import sys

import ratchet
from ratchet.types import Prompt

CONFIG = {
    "name": "own-reward",
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
    "buffer": {"batch_groups": 8},
    "trainer": {"num_steps": 60, "lr": 3e-3, "lr_warmup_steps": 5},
}


def sevens(prompt: Prompt, completion: str) -> float:
    """Pay for each seven, whatever was asked."""
    return completion.count("7") / 4


def main() -> None:
    """Train, print every tenth step, and the end."""
    directory = sys.argv[1] if len(sys.argv) > 1 else None
    config = CONFIG | {"trainer": CONFIG["trainer"] | {}}
    if len(sys.argv) > 2:
        config["trainer"]["num_steps"] = int(sys.argv[2])
    with ratchet.Run(config, directory=directory, reward=sevens) as run:
        for metrics in run:
            if metrics["step"] % 10 == 0:
                reward, stale = metrics["reward_mean"], metrics["buffer/staleness_max"]
                print(f"step {metrics['step']}: reward {reward:.2f}, staleness up to {stale}")
        summary = run.wait()
    print(f"{summary['status']} after {summary['steps']} steps; see {run.directory.root}")


if __name__ == "__main__":
    main()
