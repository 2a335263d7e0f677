"""Hand in rollouts from an engine of your own, beside the engines of a run.

The engine here is a few lines of sampling with the model that the run starts from. It takes no
weights, so all it ever holds is version 0, and that is what it stamps on its tokens. The trainer
moves on, the rollouts of version 0 grow stale, and past `buffer.max_staleness` steps the buffer
takes them for what they are: the end of the program prints what became of them. An engine that
follows the run would go on; see docs/embedding.md for what a version may say.

    python examples/own_producer.py [DIRECTORY] [STEPS]
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import ratchet
from ratchet.storage.ledger import read_groups

CONFIG = Path(__file__).with_name("tiny_copy.toml")


@torch.no_grad()
def sample(model: PreTrainedModel, prompt_ids: Sequence[int], num: int) -> list[list[float]]:
    """Return token ids and their logprobs, until the end of the sequence or for `num` tokens."""
    ids, logprobs = list(prompt_ids), []
    while len(logprobs) < num and ids[-1] != model.config.eos_token_id:
        scores = model(input_ids=torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        ids.append(int(torch.multinomial(scores.exp(), 1)))
        logprobs.append(float(scores[ids[-1]]))
    return [ids[len(prompt_ids) :], logprobs]


def main() -> None:
    """Produce until the run is over."""
    directory = sys.argv[1] if len(sys.argv) > 1 else None
    changes = [f"trainer.num_steps={sys.argv[2]}"] if len(sys.argv) > 2 else []
    training = ratchet.Run(CONFIG, directory=directory, overrides=changes)
    with training, ratchet.join(training) as run:
        model = AutoModelForCausalLM.from_pretrained(run.base_model)
        tokenizer = AutoTokenizer.from_pretrained(run.base_model)
        producer = run.producer(name="producer-0")
        for work in producer.prompts():
            rollouts = []
            for _ in range(work.group_size):
                ids, logprobs = sample(model, work.prompt_ids, run.config.rollout.max_tokens)
                text = tokenizer.decode(ids, skip_special_tokens=True)
                reward = run.task.score(work.prompt, text)
                rollouts.append(work.rollout(ids, logprobs, reward=reward, version=0))
            producer.finish(work, rollouts)
        summary = training.wait()
    print(f"{summary['status']} after {summary['steps']} steps; groups of the producer:")
    groups = [g for g in read_groups(training.directory.ledger) if g.worker == "producer-0"]
    for state, num in sorted(Counter((g.state, g.reason) for g in groups).items(), key=str):
        print(f"  {num} {state[0]}" + (f" ({state[1]})" if state[1] else ""))
    print("staleness of those trained:", sorted({g.staleness for g in groups if g.trained_at}))


if __name__ == "__main__":
    main()
