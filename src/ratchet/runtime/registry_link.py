"""What a launcher has to do with the registry of its run: find it, notice when it is gone, and tell
it that the run is over.

Consumes a visit, produces the description of the run, or the reason why there is none. Waits for
the registry to come up (`meet_registry`, `end_run`) and for its end (`until_gone`), with a deadline
each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Final, NamedTuple

from ratchet.actors.role import ORDERLY, REGISTRY
from ratchet.errors import (
    ActorDead,
    AskTimeout,
    AuthFailed,
    RatchetError,
    RunFailed,
    UserError,
)
from ratchet.messages import EndRun, RunDescribed
from ratchet.runtime.role import EndOfActor
from ratchet.runtime.visitor import Visit

_ASK_S: Final = 40.0
"""Longer than a message may wait for its delivery: whoever could not deliver it says why."""
_PAUSE_S: Final = 0.2
_FIRST_WORD_S: Final = 1.0
_NEXT_WORD_S: Final = 15.0


class Gone(NamedTuple):
    """Why there is no registry any more."""

    over: bool
    """it has stopped in order, and so the run is over"""
    reason: str


async def meet_registry(
    link: Visit, *, where: str, wait_s: float, say: Callable[[str], None]
) -> RunDescribed:
    """Wait for the registry, visibly, and ask what run it has.

    Raises:
        UserError: it does not let this node in.
        RunFailed: it did not answer within `wait_s` seconds, or not with what was asked for.
    """
    async with _reminding(lambda: say(f"waiting for the registry at {where}, up to {wait_s:g} s")):
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    try:
                        return await link.describe(_ASK_S)
                    except AuthFailed as error:
                        msg = (
                            f"the registry at {where} does not let this node in: {error}; give the"
                            " --token-file, or the certificates, of its run"
                        )
                        raise UserError(msg) from None
                    except (ActorDead, AskTimeout):
                        await asyncio.sleep(_PAUSE_S)
                    except RatchetError as error:
                        msg = f"the registry at {where} cannot be understood: {error}"
                        raise RunFailed(msg) from None
    reason = link.dials.error or "it does not answer"
    msg = f"the registry at {where} could not be reached within {wait_s:g} s (--wait): {reason}"
    raise RunFailed(msg)


async def until_gone(link: Visit, *, run_id: str, wait_s: float) -> Gone:
    """Wait until the registry has stopped in order, or is away for `wait_s` seconds."""
    while True:
        end = EndOfActor(REGISTRY)
        link.registry.watch(end)
        reason = await end.reason
        if reason == ORDERLY:
            return Gone(over=True, reason="the registry has stopped")
        again = None
        with contextlib.suppress(UserError, RunFailed):
            again = await meet_registry(link, where=REGISTRY, wait_s=wait_s, say=lambda _: None)
        if again is None or again.run_id != run_id:
            return Gone(over=False, reason=f"the registry was lost and did not come back: {reason}")


async def end_run(link: Visit, message: EndRun, *, wait_s: float) -> bool:
    """End the run everywhere: a registry that is away is told when it is back. Return whether one
    has heard it within `wait_s` seconds.
    """
    with contextlib.suppress(TimeoutError, AskTimeout):
        async with asyncio.timeout(wait_s):
            while True:
                link.end_run(message)
                with contextlib.suppress(ActorDead):
                    await link.describe(wait_s)
                    return True  # what was told before is heard before
                await asyncio.sleep(_PAUSE_S)
    return False


@contextlib.asynccontextmanager
async def _reminding(remind: Callable[[], None]) -> AsyncIterator[None]:
    """Remind people while something lasts."""

    async def repeat() -> None:
        await asyncio.sleep(_FIRST_WORD_S)
        while True:
            remind()
            await asyncio.sleep(_NEXT_WORD_S)

    reminding = asyncio.create_task(repeat())
    try:
        yield
    finally:
        reminding.cancel()
