"""Tokens per second through the SGLang engine against the same load sent by a bare client.

One real server on this CPU, a tiny model, requests that are all in flight at once and all end at
their limit. Both clients send the same bodies; the bare one decodes the answer and drops it. They
take turns round by round, so that whatever else the machine does hits both; medians, their ratio
and the CPU time of this process per request are printed.

    make sglang-cpu; PYTHONPATH=. python benchmarks/sglang.py [--rounds 24] [--requests 64]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
from tests.helpers.sglang_server import PYTHON, RealServer, attached_config
from tests.helpers.tiny_models import write_tiny_model

from ratchet.backends.rollout.base import SamplingParams
from ratchet.backends.rollout.sglang.answers import request_body
from ratchet.backends.rollout.sglang.engine import SGLangEngine

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 8


class Round(NamedTuple):
    tokens_per_s: float
    cpu_ms: float
    """of this process, per request"""


async def measure(one: Callable[[int], Awaitable[int]], requests: int) -> Round:
    cpu, began = time.process_time(), time.perf_counter()
    tokens = sum(await asyncio.gather(*(one(i) for i in range(requests))))
    seconds = time.perf_counter() - began
    return Round(tokens / seconds, 1e3 * (time.process_time() - cpu) / requests)


async def compare(url: str, engine: SGLangEngine, args: argparse.Namespace) -> None:
    params = SamplingParams(args.tokens, 1.0, 0)

    async def through_ratchet(i: int) -> int:
        return len((await engine.generate([*PROMPT, 5 + i % 16], params)).token_ids)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, trust_env=False) as session:

        async def bare(i: int) -> int:
            body = request_body(
                f"bare-{i}-{time.perf_counter_ns()}",
                [*PROMPT, 5 + i % 16],
                params,
                end_ids=(),
                salt="bare",
                fields={},
            )
            async with session.post("/generate", json=body) as response:
                return len(json.loads(await response.read())["output_ids"])

        contenders = {"ratchet": through_ratchet, "bare": bare}
        rounds: dict[str, list[Round]] = {name: [] for name in contenders}
        for index in range(args.rounds + 1):
            order = list(contenders) if index % 2 else list(reversed(contenders))
            for name in order:
                made = await measure(contenders[name], args.requests)
                if index:  # the first one warms up
                    rounds[name].append(made)
    for name, made in rounds.items():
        tokens, cpu = (statistics.median(column) for column in zip(*made, strict=True))
        print(f"{name:8} {tokens:8.0f} tokens/s {cpu:7.2f} ms of CPU per request")
    ratios = [
        ours.tokens_per_s / theirs.tokens_per_s
        for ours, theirs in zip(rounds["ratchet"], rounds["bare"], strict=True)
    ]
    spread = " ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    print(f"ratio of pairs: median {statistics.median(ratios):.3f} of {spread}")


async def run(server: RealServer, model: Path, args: argparse.Namespace) -> None:
    engine = SGLangEngine(attached_config(server, model), model)
    await engine.start()
    try:
        await engine.stamp(0)
        await compare(server.url, engine, args)
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    if not PYTHON.exists():
        print("no environment for SGLang: make sglang-cpu")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model", eos_token_id=[])
        server = RealServer(model, Path(folder) / "sglang.log")
        try:
            asyncio.run(run(server, model, args))
        finally:
            server.close()


if __name__ == "__main__":
    main()
