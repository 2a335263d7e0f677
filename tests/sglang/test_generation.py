"""What the engine makes of a real server's answers: the tokens and numbers of transformers."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.helpers.rollout_engines import Subject, assert_whole, run, started, tokens_of
from tests.helpers.sglang_server import RealServer, attached_config

from ratchet.backends.models import load_model
from ratchet.backends.rollout.base import Completion, RolloutEngine, SamplingParams
from ratchet.backends.rollout.sglang.client import SGLangClient
from ratchet.backends.rollout.sglang.engine import SGLangEngine
from ratchet.errors import EngineLost, GenerationFailed, PromptTooLong

CONTEXT = 4096
END = 1
PROMPTS = ([5, 6], [7, 8, 9, 10, 11], [12] * 40)


@pytest.fixture
def subject(real_server: RealServer, real_model: Path) -> Subject:
    config = attached_config(real_server, real_model)
    return Subject(lambda: SGLangEngine(config, real_model), url=real_server.url)


def scores(model: Path, prompt: list[int], completion: Completion, t: float) -> torch.Tensor:
    """Return what transformers computes for the tokens of a completion."""
    ids = torch.tensor([prompt + tokens_of(completion)])
    with torch.inference_mode():
        logits = load_model(model, "float32")(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / t, dim=-1)
    return logprobs.gather(-1, ids[0, len(prompt) :, None])[:, 0]


def difference(model: Path, prompt: list[int], completion: Completion, t: float) -> float:
    ours = torch.tensor(completion.logprobs.numpy())
    return float((scores(model, prompt, completion, t) - ours).abs().max())


def test_greedy_tokens_and_their_logprobs_are_those_of_transformers(
    subject: Subject, real_model: Path
) -> None:
    model = load_model(real_model, "float32")

    async def scenario() -> None:
        async with started(subject) as engine:
            for prompt in PROMPTS:
                completion = await engine.generate(prompt, SamplingParams(40, 0.0, 0))
                ids = torch.tensor([prompt])
                expected = model.generate(ids, max_new_tokens=40, do_sample=False, num_beams=1)
                assert tokens_of(completion) == expected[0, len(prompt) :].tolist()
                assert difference(real_model, prompt, completion, 1.0) < 1e-4

    run(scenario())


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_logprobs_of_samples_are_those_of_transformers(
    subject: Subject, real_model: Path, temperature: float
) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            params = [SamplingParams(50, t, seed) for seed in range(8) for t in (temperature, 0.0)]
            completions = await asyncio.gather(
                *(engine.generate([5, 6], each) for each in params)  # greedy ones in one batch
            )
            for each, completion in zip(params, completions, strict=True):
                assert_whole(completion)
                t = each.temperature or 1.0
                assert difference(real_model, [5, 6], completion, t) < 1e-4
                ended = tokens_of(completion)[-1] == END
                assert END not in tokens_of(completion)[:-1]
                assert completion.finish_reason == ("stop" if ended else "length")

    run(scenario())


def test_an_end_of_sequence_belongs_to_the_completion(
    subject: Subject, real_server: RealServer, real_model: Path, tmp_path: Path
) -> None:
    greedy = SamplingParams(40, 0.0, 0)

    async def scenario() -> None:
        async with started(subject) as engine:
            whole = tokens_of(await engine.generate([5, 6], greedy))
        end = whole[4]
        ending = tmp_path / "ending"  # the run's model ends with it, the server's own does not
        shutil.copytree(real_model, ending)
        (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        config = attached_config(real_server, ending)
        async with started(Subject(lambda: SGLangEngine(config, ending))) as engine:
            completion = await engine.generate([5, 6], greedy)
            made = tokens_of(completion)
            assert made == whole[: whole.index(end) + 1]
            assert completion.finish_reason == "stop"
            assert engine.decode(made) == engine.decode(made[:-1])

    run(scenario())


def test_the_longest_requests_that_are_let_through_are_not_cut_short(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            room = CONTEXT - 2
            assert engine.context == room
            for prompt in (room - 5, room - 6):
                params = SamplingParams(room - prompt, 0.0, 0)
                completion = await engine.generate([5] * prompt, params)
                assert (
                    len(completion.token_ids) == params.max_tokens
                    or tokens_of(completion)[-1] == END
                )
            for prompt, max_tokens in ((room - 5, 6), (room - 4, 1)):
                with pytest.raises(PromptTooLong):
                    await engine.generate([5] * prompt, SamplingParams(max_tokens, 0.0, 0))

    run(scenario())


def test_an_id_beyond_the_vocabulary_does_not_reach_the_server(subject: Subject) -> None:
    async def scenario() -> None:
        async with started(subject) as engine:
            for beyond in (24, 2**31, -1):
                with pytest.raises(GenerationFailed, match="vocabulary"):
                    await engine.generate([5, beyond], SamplingParams(4, 1.0, 0))
            assert_whole(await engine.generate([5, 23], SamplingParams(4, 1.0, 0)))

    run(scenario())


async def in_flight(subject: Subject, engine: RolloutEngine) -> asyncio.Task[Completion]:
    """Start a request that will not end soon, and wait until the server has it."""
    while True:
        task = asyncio.create_task(engine.generate([5], SamplingParams(4000, 1.5, 0)))
        waiting = asyncio.create_task(subject.batch_of(1))
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not task.done():
            return task


def test_what_somebody_else_aborts_is_no_sample(subject: Subject, real_server: RealServer) -> None:
    async def scenario() -> None:
        client = SGLangClient(real_server.url)
        async with started(subject) as engine:
            task = await in_flight(subject, engine)
            await client.control("/abort_request", {"rid": "", "abort_all": True})
            with pytest.raises(GenerationFailed, match="'abort'"):
                await task
            assert engine.version == 0
        await client.close()

    run(scenario())


def test_tokens_of_weights_that_the_run_has_not_sent_end_the_engine(
    subject: Subject, real_server: RealServer
) -> None:
    async def scenario() -> None:
        client = SGLangClient(real_server.url)
        async with started(subject) as engine:
            watch = asyncio.create_task(engine.watch())
            await client.set_version("default")
            with pytest.raises(GenerationFailed, match="'default'"):
                await engine.generate([5], SamplingParams(4, 1.0, 0))
            assert engine.version is None
            with pytest.raises(EngineLost, match="'default'"):
                await watch
        await client.close()

    run(scenario())
