"""VersionRegistry: the single writer of policy versions, and of who is alive.

Consumes `AcquireTerm`, `ReserveVersion`, `CommitVersion`, `BurnVersion` of trainers, `RegisterRole`
of every role, and `Down` of the roles that it watches. Produces durable numbers, and the events
`VersionUpdated`, `RoleJoined` and `RoleLeft` to all registered roles. Waits for nothing but its
disk: each number is on it before it is answered.

An older term is refused with `StaleTerm`, which names both. Events go out after the commit is
durable. A role may act on a version before its event arrives (an engine generates with it as soon
as it is loaded): whoever meets a number that it has not heard of asks `DescribeLineage` before it
judges, and the number is always here, because it was reserved before its transfer began.
"""

from __future__ import annotations

from typing import assert_never

from ratchet.actors.actor import Actor
from ratchet.actors.role import ORDERLY
from ratchet.actors.system import System
from ratchet.errors import StaleTerm, VersionError
from ratchet.messages import (
    AcquireTerm,
    BurnVersion,
    CommitVersion,
    DescribeLineage,
    Down,
    LineageDescribed,
    Message,
    RegisterRole,
    RegistryMessage,
    ReserveVersion,
    RoleJoined,
    RoleLeft,
    RoleRegistered,
    TermAcquired,
    VersionBurnt,
    VersionCommitted,
    VersionReserved,
    VersionUpdated,
)
from ratchet.storage.versions import VersionStore
from ratchet.types import RoleInfo, Term


class VersionRegistry(Actor[RegistryMessage]):
    """Numbers, terms, lineage, and the directory of roles."""

    def __init__(self, system: System, name: str, *, store: VersionStore) -> None:
        super().__init__(system, name)
        self._store = store
        self._roles: dict[str, RoleInfo] = {}

    def on_stop(self) -> None:
        """Close the file."""
        self._store.close()

    def receive(self, message: RegistryMessage) -> Message | None:
        """Handle one message; every reply is durable before it is returned."""
        match message:
            case RegisterRole():
                return self._register(message.role)
            case AcquireTerm():
                term = self._store.acquire_term(message.trainer, message.incarnation, self._wall())
                self.log.info("term_acquired", term=term, trainer=message.trainer)
                return TermAcquired(term, self._store.records())
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
                found = (self._store.record(version) for version in message.versions)
                return LineageDescribed(tuple(record for record in found if record is not None))
            case Down():
                self._down(message)
                return None
            case _:
                assert_never(message)

    def _register(self, role: RoleInfo) -> RoleRegistered:
        known = self._roles.get(role.name)
        if known != role:
            if known is not None:
                self._leave(known, "replaced by a new incarnation")
            self._tell_all(RoleJoined(role))
            self._roles[role.name] = role
            self.system.ref(role.name).watch(self.actor_ref)
            self.log.info("role_joined", kind=role.kind, name=role.name, life=role.incarnation)
        return RoleRegistered(tuple(self._roles.values()), self._store.records())

    def _reserve(self, message: ReserveVersion) -> VersionReserved:
        self._check(message.term)
        version = self._store.reserve(message.term, message.step, message.parent, self._wall())
        rollouts = tuple(role for role in self._roles.values() if role.kind == "rollout")
        return VersionReserved(version, rollouts)

    def _commit(self, message: CommitVersion) -> VersionCommitted:
        self._check(message.term)
        self._store.commit(message.version, message.digest, self._wall())
        record = self._store.record(message.version)
        if record is None:
            msg = f"version {message.version} vanished from the store at its commit"
            raise VersionError(msg)
        self._tell_all(VersionUpdated(record))
        self.log.info("version_updated", version=record.version, step=record.step)
        return VersionCommitted(message.version)

    def _down(self, message: Down) -> None:
        role = self._roles.get(message.name)
        if role is not None:
            self._leave(role, message.reason)

    def _leave(self, role: RoleInfo, reason: str) -> None:
        del self._roles[role.name]
        note = self.log.info if reason == ORDERLY else self.log.warning
        note("role_left", kind=role.kind, name=role.name, reason=reason)
        self._tell_all(RoleLeft(role, reason))

    def _check(self, term: Term) -> None:
        newest = self._store.newest_term()
        if term < newest:
            msg = f"term {term} is fenced by term {newest}: another trainer has taken over"
            raise StaleTerm(msg)

    def _tell_all(self, event: VersionUpdated | RoleJoined | RoleLeft) -> None:
        for name in self._roles:
            self.system.ref(name).tell(event)

    def _wall(self) -> float:
        return self.system.wall_time()
