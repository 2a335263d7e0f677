"""Tokens per second of the torch engine against transformers' generate, on the same model and load.

Both run on one thread in this process, interleaved round by round, so that whatever else the
machine does hits both; medians and their ratio are printed. `generate` gets the prompts in chunks
of the best of a few sizes, each with the longest `max_new_tokens` of its chunk, because it has no
limit per sequence; only the tokens asked for are counted.

    python benchmarks/engine.py [--rounds 7] [--threads 1]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ratchet.backends.models import (
    build_model,
    char_tokenizer,
    load_model,
    save_model_directory,
)
from ratchet.backends.rollout.base import SamplingParams
from ratchet.backends.rollout.torch import TorchEngine

CHARS = "0123456789+="
MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 192,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
    "eos_token_id": [],  # both always make as many tokens as asked
}


class Load(NamedTuple):
    name: str
    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


class Sample(NamedTuple):
    wall_s: float
    cpu_s: float


def make_loads() -> list[Load]:
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(3, 3 + len(CHARS)) for _ in range(length)]

    unique = [prompt(draw.randint(3, 8)) for _ in range(256)]
    groups = [p for p in (prompt(5) for _ in range(32)) for _ in range(8)]
    return [
        Load("256 prompts x 4..32 tokens", unique, [draw.randint(4, 32) for _ in unique]),
        Load("32 prompts x 8 siblings x 5 tokens", groups, [5] * 256),
    ]


async def engine_round(engine: TorchEngine, load: Load, seed: int) -> Sample:
    began, cpu = time.perf_counter(), time.process_time()
    completions = await asyncio.gather(
        *[
            engine.generate(prompt, SamplingParams(length, 1.0, seed + i))
            for i, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True))
        ]
    )
    sample = Sample(time.perf_counter() - began, time.process_time() - cpu)
    assert sum(len(c.token_ids) for c in completions) == load.num_tokens
    return sample


def generate_round(model: Any, load: Load, chunk: int) -> Sample:
    began, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(load.prompts), chunk):
        prompts = load.prompts[start : start + chunk]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(load.lengths[start : start + chunk]),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=0,
        )
    return Sample(time.perf_counter() - began, time.process_time() - cpu)


def report(load: Load, engine: list[Sample], generate: list[Sample], chunk: int) -> None:
    print(f"{load.name}: {load.num_tokens} tokens, medians of {len(engine)} rounds")
    for field in Sample._fields:
        ours = statistics.median(getattr(s, field) for s in engine)
        theirs = statistics.median(getattr(s, field) for s in generate)
        print(
            f"  {field:6}  engine {1e3 * ours:7.1f} ms {load.num_tokens / ours:9.0f} tokens/s"
            f"   generate (chunks of {chunk}) {1e3 * theirs:7.1f} ms"
            f" {load.num_tokens / theirs:9.0f} tokens/s   ratio {theirs / ours:.2f}"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = char_tokenizer(CHARS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        save_model_directory(build_model(MODEL, 0, tokenizer), tokenizer, path)
        engine = TorchEngine(path, threads=options.threads)
        await engine.start()
        await engine.stamp(0)
        model = load_model(path, "float32")
        for load in make_loads():
            await engine_round(engine, load, 0)
            chunk = min((64, 128, 256), key=lambda size: generate_round(model, load, size).cpu_s)
            ours, theirs = [], []
            for index in range(options.rounds):
                ours.append(await engine_round(engine, load, 1000 * index))
                theirs.append(generate_round(model, load, chunk))
            report(load, ours, theirs, chunk)
        await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
