"""Finding the registry, and noticing that it is gone; on a loop without real time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tests.simulation.loop import run_virtual

from ratchet.errors import (
    ActorDead,
    AskTimeout,
    AuthFailed,
    HandlerFailed,
    RatchetError,
    RunFailed,
    UserError,
)
from ratchet.messages import Down, EndRun, RunDescribed
from ratchet.runtime.registry_link import Gone, end_run, meet_registry, until_gone
from ratchet.status import RunStatus

STATUS = RunStatus("x", 1.0, 0, None, None, 0, ())


class Link:
    """A visit to a registry that answers from `up_at` to `down_at`, and is another's run then."""

    def __init__(self, up_at: float = 0.0, refusal: RatchetError | None = None) -> None:
        self.up_at = up_at
        self.refusal = refusal
        self.run_id = "run-1"
        self.dials = SimpleNamespace(error=None)
        self.watchers: list[Any] = []
        self.told: list[EndRun] = []
        self.registry = SimpleNamespace(watch=self.watchers.append)

    async def describe(self, timeout_s: float) -> RunDescribed:
        if self.refusal is not None:
            raise self.refusal
        now = asyncio.get_running_loop().time()
        if now >= self.up_at:
            return RunDescribed(self.run_id, "", STATUS)
        self.dials.error = ConnectionRefusedError("nobody there")
        await asyncio.sleep(min(30.0, timeout_s, self.up_at - now))  # the delivery deadline
        raise ActorDead("could not be reached")

    def end_run(self, message: EndRun) -> None:
        self.told.append(message)

    def end(self, reason: str) -> None:
        """The registry has ended."""
        self.watchers[-1].tell(Down("registry", reason))


def virtually(body: Callable[[], Any]) -> Any:
    async def main() -> str:
        results.append(await body())
        return ""

    results: list[Any] = []
    run_virtual(main())
    return results[0]


def test_it_is_waited_for_and_people_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    link = Link(up_at=100.0)
    found = virtually(
        lambda: meet_registry(link, where="tcp:a:1", wait_s=300.0, say=said.append)  # type: ignore[arg-type]
    )
    assert found.run_id == "run-1"
    assert set(said) == {"waiting for the registry at tcp:a:1, up to 300 s"}
    assert len(said) == 7  # after a second, and then every fifteen


def test_one_that_is_up_is_met_without_a_word() -> None:
    said: list[str] = []
    virtually(lambda: meet_registry(Link(), where="a", wait_s=9.0, say=said.append))  # type: ignore[arg-type]
    assert said == []


def test_one_that_does_not_come_is_given_up_in_time_with_the_last_reason() -> None:
    async def body() -> float:
        loop = asyncio.get_running_loop()
        link: Any = Link(up_at=1e9)
        with pytest.raises(
            RunFailed, match=r"tcp:a:1 could not be .* 70 s \(--wait\): nobody there"
        ):
            await meet_registry(link, where="tcp:a:1", wait_s=70.0, say=lambda _: None)
        return loop.time()

    assert virtually(body) == pytest.approx(70.0, abs=0.01)


def test_a_refusal_is_the_users_to_mend_and_is_not_repeated() -> None:
    async def body() -> float:
        link: Any = Link(refusal=AuthFailed("not the same key"))
        with pytest.raises(UserError, match="does not let this node in: not the same key; give"):
            await meet_registry(link, where="a", wait_s=70.0, say=lambda _: None)
        return asyncio.get_running_loop().time()

    assert virtually(body) == 0.0


def test_what_is_no_answer_is_not_asked_for_again() -> None:
    link: Any = Link(refusal=HandlerFailed("it does not accept DescribeRun"))
    with pytest.raises(RunFailed, match="cannot be understood: it does not accept DescribeRun"):
        virtually(lambda: meet_registry(link, where="a", wait_s=70.0, say=lambda _: None))


def gone_after(act: Callable[[Link], None], reason: str = "it died") -> tuple[Gone | None, float]:
    """What is made of the end of a registry, and when."""

    async def body() -> tuple[Gone | None, float]:
        link: Any = Link()
        waiting = asyncio.create_task(until_gone(link, run_id="run-1", wait_s=60.0))
        await asyncio.sleep(1)
        act(link)
        link.end(reason)
        try:
            async with asyncio.timeout(600):
                return await waiting, asyncio.get_running_loop().time()
        except TimeoutError:
            return None, 0.0

    result: tuple[Gone | None, float] = virtually(body)
    return result


def test_its_end_in_order_is_the_end_of_the_run() -> None:
    gone, at = gone_after(lambda link: None, "stopped")
    assert gone is not None
    assert (gone.over, at) == (True, 1.0)


def test_one_that_comes_back_in_time_is_not_gone() -> None:
    def away(link: Link) -> None:
        link.up_at = 50.0

    assert gone_after(away)[0] is None


def test_one_that_does_not_come_back_is_gone_and_so_is_one_with_another_run() -> None:
    def away(link: Link) -> None:
        link.up_at = 1e9

    def other(link: Link) -> None:
        link.run_id = "run-2"

    def closed(link: Link) -> None:
        link.refusal = AskTimeout("no answer")

    for act, at in ((away, 61.0), (other, 1.0), (closed, 61.0)):
        gone, then = gone_after(act)
        assert gone == Gone(False, "the registry was lost and did not come back: it died")
        assert then == pytest.approx(at, abs=0.01)


@pytest.mark.parametrize(
    ("up_at", "heard", "at"), [(0.0, True, 0.0), (50.0, True, 50.2), (1e9, False, 70.0)]
)
def test_the_end_of_the_run_is_told_until_it_is_heard(up_at: float, heard: bool, at: float) -> None:
    async def body() -> tuple[bool, float]:
        link: Any = Link(up_at)
        was_heard = await end_run(link, EndRun("me", "failed", "no memory"), wait_s=70.0)
        assert len(link.told) == 1 + (up_at > 0.0) * 2  # once to each try: it may have been lost
        return was_heard, asyncio.get_running_loop().time()

    assert virtually(body) == (heard, pytest.approx(at, abs=0.5))
