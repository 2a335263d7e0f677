"""VersionRegistry: the single writer of policy versions, and of who is alive.

Consumes `AcquireTerm`, `ReserveVersion`, `CommitVersion`, `BurnVersion` of trainers, `RegisterRole`
and `RoleReported` of every role, and `Down` of the roles that it watches. Produces durable numbers,
the events `VersionUpdated` and `RunEnded` to all registered roles, `RoleJoined` and `RoleLeft` to
those that have to do with the role, the status of the run for whoever asks, and a word in the log
when a role falls silent. Waits for nothing but its disk: each number is on it before it is
answered.

It dies alone: its next life has the numbers, the terms and the lineage from the file, and hears
from the roles who is there, as each registers again. Whatever it was asked and did not answer is
asked again: a commit that was durable already stays what it was, and a number whose reply was lost
is burnt. A role that this life has given up is not let in again, nor is a trainer of an older term.

The run ends here for everyone: after `EndRun` each role is told, and the registry stops when the
last one has left, or after `_LEAVE_S` seconds.

An older term is refused with `StaleTerm`, which names both. Events go out after the commit is
durable. A role may act on a version before its event arrives (an engine generates with it as soon
as it is loaded): whoever meets a number that it has not heard of asks `DescribeLineage` before it
judges, and the number is always here, because it was reserved before its transfer began.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, assert_never

from ratchet.actors.actor import Actor
from ratchet.actors.membership import Membership
from ratchet.actors.role import ORDERLY
from ratchet.actors.system import System
from ratchet.actors.vacancy import Vacancy
from ratchet.errors import GivenUp, StaleTerm, VersionError
from ratchet.messages import (
    AcquireTerm,
    BurnVersion,
    CommitVersion,
    DescribeLineage,
    DescribeRun,
    Down,
    EndRun,
    LineageDescribed,
    Message,
    RegisterRole,
    RegistryMessage,
    ReserveVersion,
    RoleJoined,
    RoleLeft,
    RoleRegistered,
    RoleReported,
    RunDescribed,
    RunEnded,
    TermAcquired,
    VersionBurnt,
    VersionCommitted,
    VersionReserved,
    VersionUpdated,
)
from ratchet.status import RoleReport, RunStatus
from ratchet.storage.versions import VersionStore
from ratchet.types import RoleInfo, Term

_LEAVE_S: Final = 5.0


class StopWaiting(Message, frozen=True):
    """To itself: the run is over, and some role has not left."""


class VersionRegistry(Actor[RegistryMessage | StopWaiting]):
    """Numbers, terms, lineage, and the directory of roles."""

    def __init__(
        self,
        system: System,
        name: str,
        *,
        store: VersionStore,
        run_name: str = "",
        config: str = "",
        suspect_s: float = 5.0,
        trainer_wait_s: float = 600.0,
    ) -> None:
        super().__init__(system, name)
        self._store = store
        self._run_name = run_name
        self._config = config
        me = RoleInfo("registry", name, self.actor_urn, self._own_address())
        self._roles = Membership(me, suspect_s)
        self._started = self.now()
        self._ended: RunEnded | None = None
        self._vacancy = Vacancy(
            system, wait_s=trainer_wait_s, now=self.now, missed=self._trainer_missed
        )

    def on_start(self) -> None:
        """In a run that has been trained, wait for whoever trained it to come back."""
        if self._store.newest_term():
            self._vacancy.open()
        self._supersede()

    def release(self) -> None:
        """Close the file, also after a failure: the next life opens it."""
        self._vacancy.close()
        self._store.close()

    def receive(self, message: RegistryMessage | StopWaiting) -> Message | None:
        """Handle one message; every reply is durable before it is returned."""
        match message:
            case RegisterRole():
                return self._register(message.role)
            case AcquireTerm():
                return self._acquire(message)
            case ReserveVersion():
                return self._reserve(message)
            case CommitVersion():
                return self._commit(message)
            case BurnVersion():
                self._check(message.term)
                self._store.burn(message.version, message.reason, self._wall())
                self.log.warning("version_burnt", version=message.version, reason=message.reason)
                return VersionBurnt(message.version)
            case DescribeLineage():
                return LineageDescribed(self._store.with_burnt_ancestors(message.versions))
            case DescribeRun():
                return RunDescribed(self._store.run, self._config, self._status())
            case RoleReported():
                self._reported(message.report)
                return None
            case EndRun():
                self._end_run(message)
                return None
            case StopWaiting():
                self.stop()
                return None
            case Down():
                self._down(message)
                return None
            case _:
                assert_never(message)

    def _register(self, role: RoleInfo) -> RoleRegistered:
        self._check_life(role)
        known = self._roles.get(role.name)
        if known != role:
            if known is not None:
                self._leave(known, "replaced by a new incarnation")
            self.system.book.learn(role.name, role.address)
            self._tell(self._roles.who_hears_of(role), RoleJoined(role))
            self._roles.join(role)
            self._vacancy.joined(role)
            self.system.ref(role.name).watch(self.actor_ref)
            self.log.info("role_joined", kind=role.kind, name=role.name, life=role.incarnation)
            if self._ended is not None:
                self.system.ref(role.name).tell(self._ended)
        others = (one for one in self._roles.who_hears_of(role) if one.name != role.name)
        return RoleRegistered((*others, role), self._store.records())

    def _check_life(self, role: RoleInfo) -> None:
        """Let nobody back in whom the others have taken for dead, or whom another has followed."""
        reason = self._roles.end_of(role)
        if reason is not None:
            msg = f"the others have given {role.name} up, which has to start again: {reason}"
            raise GivenUp(msg)
        self._check_term(role.incarnation)

    def _acquire(self, message: AcquireTerm) -> TermAcquired:
        self._check_term(message.incarnation)  # the answer was lost, and another has taken over
        term = self._store.acquire_term(message.trainer, message.incarnation, self._wall())
        self._supersede()
        self.log.info("term_acquired", term=term, trainer=message.trainer)
        return TermAcquired(term, self._store.records())

    def _check_term(self, incarnation: str) -> None:
        """Let no life go on that has held a term which is not the newest."""
        term = self._store.term_of(incarnation)
        if term is not None:
            self._check(term)

    def _reported(self, report: RoleReport) -> None:
        """Keep it; and with each report of this process itself, look who has fallen silent.

        So the look follows the process's own heartbeat, and a simulation without reports has none.
        """
        self._roles.report(report, self.now())
        if report.name != self.name:
            return
        for role, silent, connected, silent_s in self._roles.listen(
            self.system.links(), self.now()
        ):
            note = self.log.warning if silent else self.log.info
            note(
                "role_suspected" if silent else "role_recovered",
                kind=role.kind,
                name=role.name,
                life=role.incarnation,
                connected=connected,
                silent_s=round(silent_s, 1),
            )

    def _reserve(self, message: ReserveVersion) -> VersionReserved:
        self._check(message.term)
        version = self._store.reserve(message.term, message.step, message.parent, self._wall())
        rollouts = tuple(role for role in self._roles if role.kind == "rollout")
        return VersionReserved(version, rollouts)

    def _commit(self, message: CommitVersion) -> VersionCommitted:
        self._check(message.term)
        before = self._store.record(message.version)
        self._store.commit(message.version, message.digest, self._wall())
        record = self._store.record(message.version)
        if record is None:
            msg = f"version {message.version} vanished from the store at its commit"
            raise VersionError(msg)
        if before is not None and before.state != "live":  # else all who register know of it
            self._tell(self._roles, VersionUpdated(record))
            self.log.info("version_updated", version=record.version, step=record.step)
        return VersionCommitted(message.version)

    def _down(self, message: Down) -> None:
        role = self._roles.get(message.name)
        if role is not None:
            self._leave(role, message.reason)

    def _leave(self, role: RoleInfo, reason: str) -> None:
        self._roles.leave(role, reason)
        self._vacancy.left(role, reason)
        note = self.log.info if reason == ORDERLY else self.log.warning
        note("role_left", kind=role.kind, name=role.name, reason=reason)
        self._tell(self._roles.who_hears_of(role), RoleLeft(role, reason))
        if self._ended is not None and not len(self._roles):
            self.stop()

    def _trainer_missed(self, why: str) -> None:
        self.actor_ref.tell(EndRun(self.name, "failed", why))

    def _end_run(self, message: EndRun) -> None:
        newest = self._store.newest_term()
        if message.term is not None and message.term < newest:
            self.log.warning("end_fenced", by=message.who, term=message.term, newer=newest)
            return
        if self._ended is not None:
            return
        note = self.log.error if message.status == "failed" else self.log.info
        note("run_ended", status=message.status, reason=message.reason, by=message.who)
        self._ended = self.system.run_ended = RunEnded(message.status, message.reason)
        self._tell(self._roles, self._ended)
        self._vacancy.close()
        self.after(_LEAVE_S, StopWaiting())

    def _status(self) -> RunStatus:
        now = self.now()
        return RunStatus(
            name=self._run_name,
            uptime_s=now - self._started,
            term=self._store.newest_term(),
            live=self._store.newest_live(),
            newest=self._store.newest(),
            num_burnt=self._store.num_burnt(),
            roles=self._roles.statuses(now, self.system.links()),
            suspect_s=self._roles.suspect_s,
            end=self._ended.status if self._ended else None,
            end_reason=self._ended.reason if self._ended else None,
        )

    def _check(self, term: Term) -> None:
        newest = self._store.newest_term()
        if term < newest:
            msg = f"term {term} is fenced by term {newest}: another trainer has taken over"
            raise StaleTerm(msg)

    def _tell(
        self,
        roles: Iterable[RoleInfo],
        event: VersionUpdated | RoleJoined | RoleLeft | RunEnded,
    ) -> None:
        for role in roles:
            self.system.ref(role.name).tell(event)

    def _supersede(self) -> None:
        """Let no trainer back in whose term another of its name has followed: links do not tell who
        was first, once this process is another.
        """
        holders = self._store.holders()
        newest = dict(holders)
        for trainer, incarnation in holders:
            if newest[trainer] != incarnation:
                self.system.book.supersede(trainer, incarnation)

    def _own_address(self) -> str:
        try:
            return str(self.system.book.locate(self.name))
        except LookupError:  # everybody is in this process
            return ""

    def _wall(self) -> float:
        return self.system.wall_time()
