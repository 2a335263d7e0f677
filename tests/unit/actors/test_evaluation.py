from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from tests.helpers.actors import RecordingLog
from tests.helpers.refs import RecordedDirectory

from ratchet.actors.evaluation import REPLY_S, Evaluation, evaluate
from ratchet.config import EvalConfig
from ratchet.errors import ActorDead, VersionError
from ratchet.messages import EvaluatePolicy, Message, PolicyEvaluated
from ratchet.transport.mailbox.base import Ref
from ratchet.types import RoleInfo

CONFIG = EvalConfig(num_prompts=10, samples=3, temperature=0.5, timeout_s=9.0)
Answer = Callable[[EvaluatePolicy], Message]


def all_of(reward: float | None) -> Answer:
    return lambda message: PolicyEvaluated(message.version, (reward,) * message.count)


def fails(error: Exception) -> Answer:
    def answer(message: EvaluatePolicy) -> Message:
        raise error

    return answer


def run(engines: dict[str, Answer]) -> tuple[Evaluation, list[EvaluatePolicy], RecordingLog]:
    asked: list[EvaluatePolicy] = []
    log = RecordingLog()

    async def ask(ref: Ref, message: Any, *, timeout: float | None = None) -> Any:
        assert timeout == CONFIG.timeout_s + REPLY_S
        asked.append(message)
        return engines[ref.name](message)

    ended: list[str] = []

    async def main() -> Evaluation:
        roles = [RoleInfo("rollout", name, "a") for name in engines]
        return await evaluate(
            7,
            roles,
            config=CONFIG,
            directory=RecordedDirectory(),
            ask=ask,
            log=log,
            ended=lambda engine: ended.append(engine.name),
        )

    found = asyncio.run(main())
    assert sorted(ended) == sorted(engines)
    return found, asked, log


@pytest.mark.parametrize("num_engines", [1, 2, 3, 4, 10, 13])
def test_every_prompt_is_asked_for_once(num_engines: int) -> None:
    engines = {f"r{i}": all_of(0.5) for i in range(num_engines)}
    found, asked, _ = run(engines)
    prompts = [i for m in asked for i in range(m.first, m.first + m.count)]
    assert prompts == list(range(10))
    assert {(m.version, m.samples, m.temperature) for m in asked} == {(7, 3, 0.5)}
    assert found == Evaluation(7, 0.5, 10, 0)


def test_the_mean_is_over_what_could_be_scored() -> None:
    found, _, log = run({"r0": all_of(1.0), "r1": all_of(None)})
    assert found == Evaluation(7, accuracy=1.0, num_prompts=5, num_failed=5)
    assert log.events == []


def test_an_engine_that_is_lost_costs_its_prompts_and_says_so() -> None:
    found, _, log = run({"r0": all_of(0.25), "r1": fails(VersionError("got tokens of 8"))})
    assert found == Evaluation(7, 0.25, 5, 5)
    (failure,) = log.named("evaluation_failed")
    assert (failure["engine"], failure["version"], failure["detail"]) == (
        "r1", 7, "got tokens of 8",
    )  # fmt: skip


def test_several_tasks_have_a_mean_each() -> None:
    def mixed(message: EvaluatePolicy) -> Message:
        return PolicyEvaluated(
            message.version, (1.0, None, 0.0, 0.5, 0.25), ("a", "a", "b", "a", "b")
        )

    found, _, _ = run({"r0": mixed, "r1": mixed})
    assert found.line() == {
        "version": 7, "accuracy": 0.4375, "num_prompts": 8, "num_failed": 2,
        "tasks": {
            "a": {"accuracy": 0.75, "num_prompts": 4}, "b": {"accuracy": 0.125, "num_prompts": 4},
        },
    }  # fmt: skip
    assert "tasks" not in run({"r0": all_of(0.5)})[0].line()


def test_no_result_is_none_not_zero() -> None:
    nothing = Evaluation(7, accuracy=None, num_prompts=0, num_failed=10)
    assert run({"r0": fails(ActorDead("gone")), "r1": all_of(None)})[0] == nothing
    assert run({})[0] == nothing


def test_what_nobody_expected_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run({"r0": fails(ZeroDivisionError())})
