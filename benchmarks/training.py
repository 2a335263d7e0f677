"""Milliseconds of one training step on the copy job: Ratchet's backend against a bare loop.

The bare loop is the least that trains the same model: tensors ready-made, one forward pass, GRPO's
clipped loss, AdamW, no checks, no metrics. The backend starts from groups as they come out of
mailboxes. Both run interleaved in one process, step by step, on one thread; CPU seconds of the
process are reported beside wall time, because other work on the machine moves the latter.

    python benchmarks/training.py [--steps 100] [--device cpu]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.helpers.training import make_groups, training_config, write_model

from ratchet.backends.models import load_model
from ratchet.backends.training.fsdp import FsdpBackend
from ratchet.types import RolloutGroup

MODEL = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


class BareLoop:
    """The training half of a minimal GRPO script."""

    def __init__(self, model_dir: Path, groups: list[RolloutGroup], device: str) -> None:
        self.model = load_model(model_dir, "float32").to(device)
        self.adam = torch.optim.AdamW(
            self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0
        )
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        prompts = np.stack([rollout.prompt_ids.numpy() for rollout in rollouts])
        completions = np.stack([rollout.completion_ids.numpy() for rollout in rollouts])
        behavior = np.stack([rollout.behavior_logprobs.numpy() for rollout in rollouts])
        self.first = prompts.shape[1] - 1
        self.ids = torch.from_numpy(np.concatenate([prompts, completions], 1)).long().to(device)
        self.completions = torch.from_numpy(completions.copy()).long().to(device)
        self.behavior = torch.from_numpy(behavior.copy()).to(device)
        rewards = torch.tensor([group.rewards for group in groups], device=device)
        centred = rewards - rewards.mean(1, keepdim=True)
        self.advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).view(-1, 1)

    def step(self) -> None:
        logits = self.model(self.ids[:, :-1], use_cache=False).logits[:, self.first :]
        logprobs = logits.log_softmax(-1).gather(2, self.completions[..., None])[..., 0]
        ratio = (logprobs - self.behavior).exp()
        clipped = ratio.clamp(0.8, 1.28)
        loss = -torch.min(ratio * self.advantages, clipped * self.advantages).mean()
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.adam.step()


async def measure(arguments: argparse.Namespace) -> dict[str, object]:
    config = training_config(
        model={"build": MODEL, "tokenizer_chars": "0123456789>"}, buffer={"batch_groups": 32}
    )
    groups = make_groups(32, 8, prompt_tokens=(5, 5), completion_tokens=(5, 5))
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_model(config, Path(folder) / "model")
        backend = FsdpBackend(model_dir, config=config, device=arguments.device)
        await backend.start()
        bare = BareLoop(model_dir, groups, arguments.device)
    torch.set_num_threads(1)

    async def ours() -> None:
        report = await backend.forward_backward(groups)
        assert report.finite
        assert (await backend.optimizer_step()).applied

    async def theirs() -> None:
        await asyncio.to_thread(bare.step)

    def synchronise() -> None:
        if arguments.device.startswith("cuda"):
            torch.cuda.synchronize()

    async def clock(run: Callable[[], Awaitable[None]]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        await run()
        synchronise()
        return (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3

    times: dict[str, list[tuple[float, float]]] = {"ratchet": [], "bare_loop": []}
    for step in range(arguments.steps + 10):
        for name, run in (("ratchet", ours), ("bare_loop", theirs)):
            measured = await clock(run)
            if step >= 10:
                times[name].append(measured)
    await backend.close()
    medians = {
        name: {
            "wall_ms": round(statistics.median(wall for wall, _ in values), 2),
            "cpu_ms": round(statistics.median(cpu for _, cpu in values), 2),
        }
        for name, values in times.items()
    }
    ratios = {
        f"{kind}_ratio": round(medians["ratchet"][kind] / medians["bare_loop"][kind], 3)
        for kind in ("wall_ms", "cpu_ms")
    }
    return {"device": arguments.device, "steps": arguments.steps, **medians, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
