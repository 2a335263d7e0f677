"""A launcher that stands by: a node of its own at the run, with nothing on it but the watch.

Consumes the way to the registry; produces the reason why a trainer is to be started here, or how
the run has ended before that. Waits for the trainer's end (`actors/standby.py`), or the run's. The
trainer itself is started only then, as a process like any other: until it is needed nothing of it
is in memory, on no device either, which may be somebody else's meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Final

import msgspec

from ratchet.actors.standby import StandbyActor
from ratchet.config import Config
from ratchet.errors import ActorDead, AskTimeout, AuthFailed, RatchetError
from ratchet.messages import RunDescribed
from ratchet.observability.logs import Log
from ratchet.runtime.embed_guest import Host
from ratchet.runtime.embed_link import Invitation
from ratchet.runtime.role import RoleOutcome
from ratchet.runtime.visitor import Visit
from ratchet.status import RunStatus

_TERM_S: Final = 5.0


async def stand_by(
    config: Config, invitation: Invitation, run_id: str, log: Log
) -> RoleOutcome | str:
    """Wait until the run has no trainer; return why, or how the run has ended first.

    Args:
        config: of this node; its `runtime.suspect_s` is how long a trainer may take to come back.
        invitation: how to reach the registry.
        run_id: of the run.
        log: of the launcher.
    """
    described = RunDescribed(run_id, config.to_toml(), _NOTHING)
    host = Host(invitation, described, timeout_s=config.runtime.ask_timeout_s, log=log)
    vacant: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    try:
        member = await host.new_member("standby", None)
        actor = StandbyActor.start(
            member.system,
            member.role,
            return_s=config.runtime.suspect_s,
            vacant=vacant.set_result,
        )
        member.started(actor, config.runtime.heartbeat_s)
        log.info("stands_by", name=member.role.name)
        why = await member.or_end(vacant)
    except RatchetError as error:
        return RoleOutcome("failed", f"the standby has failed: {error}")
    finally:
        await host.leave()
    ended = member.system.run_ended
    if why is not None:
        return why
    return RoleOutcome("finished", "" if ended is None else ended.reason)


async def with_newest_term(outcome: RoleOutcome, link: Visit) -> RoleOutcome:
    """Say which term is in force, to a trainer that was replaced."""
    try:
        newest = (await link.describe(_TERM_S)).status.term
    except (ActorDead, AskTimeout, AuthFailed):
        return outcome  # the registry is away, and the rest is true without it
    detail = f"{outcome.detail}; term {newest} is in force"
    return msgspec.structs.replace(outcome, detail=detail)


_NOTHING: Final = RunStatus("", 0.0, 0, None, None, 0, ())
