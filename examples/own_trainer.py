"""Train with a loop of your own: batches come from a running buffer, your module's weights go out.

The registry, the buffer and a rollout worker run as processes. They could as well run on other
machines: `ratchet.join` takes the address of a registry just like the directory of a run. The loop
below is all there is to a trainer: its own loss, its own optimiser, and `publish`.

    python examples/own_trainer.py [DIRECTORY] [STEPS]
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import ratchet
from ratchet.runtime.embed_loop import OwnBatch

CONFIG = Path(__file__).with_name("tiny_copy.toml")


def loss_of(model: torch.nn.Module, batch: OwnBatch) -> torch.Tensor:
    """Return the policy gradient, with the ratio to the policy that sampled cut off at 2."""
    rows = batch.tensors()
    kept = rows.targets.shape[1]
    logits = model(input_ids=rows.input_ids, logits_to_keep=kept).logits
    logprobs = logits.log_softmax(-1).gather(-1, rows.targets[..., None])[..., 0]
    ratio = (logprobs.detach() - rows.behavior_logprobs).exp().clamp(max=2.0)
    return -(ratio * logprobs * rows.advantages)[rows.loss_mask].mean()


def main() -> None:
    """Train, and print every tenth step."""
    directory = sys.argv[1] if len(sys.argv) > 1 else None
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 60
    parts = ratchet.Run(CONFIG, directory=directory, roles=("registry", "buffer", "rollout"))
    with parts, ratchet.join(parts) as run:
        model = AutoModelForCausalLM.from_pretrained(run.base_model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        trainer = run.trainer(model)
        for batch in trainer.batches(steps):
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            version = trainer.publish(loss=loss.item())
            if batch.step % 10 == 0:
                reward = sum(batch.rewards) / len(batch.rewards)
                print(f"step {batch.step}: reward {reward:.2f}, published version {version}")
        trainer.finish()
        print(f"{parts.wait()['status']} after {batch.step} steps; see {parts.directory.root}")


if __name__ == "__main__":
    main()
