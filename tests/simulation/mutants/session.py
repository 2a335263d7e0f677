"""Faults of session layers: what is lost, doubled, or never given up between two processes."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from tests.simulation.faults import Cut, Freeze, Kill, Revive, Silence
from tests.simulation.lives import Delays
from tests.simulation.mutants.base import Patches, mutant
from tests.simulation.ordinary import ordinary
from tests.simulation.trainer_faults import TakeOver

from ratchet.actors.role import REGISTRY, TRAINER
from ratchet.actors.weight_loads import WeightLoads
from ratchet.transport.mailbox.calls import Calls
from ratchet.transport.mailbox.lane import Lane
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.lives import Lives
from ratchet.transport.mailbox.peer import Peer
from ratchet.transport.mailbox.session import Session

_HELD_BACK: Final = ordinary(
    *[
        fault
        for at in (20.0, 24.0, 28.0, 32.0)
        for fault in (Silence(at, TRAINER, 2.0, "out"), Cut(at + 1.9, TRAINER))
    ],
    delays=Delays(step_s=0.1, token_s=0.1),
    limits=Limits(dead_s=40.0),
    seed=2,
    trainer={"num_steps": 40},
)
"""what the trainer sent is held back, and lost with its connection"""


@mutant("what has arrived is acknowledged before it is delivered", seed=2)
def acknowledged_before_delivery() -> Patches:
    receive, resume, end = Session.receive, Session.resume, Session.end

    def late(self: Any, frame: Any, num_bytes: int) -> Any:
        fresh = receive(self, frame, num_bytes)
        waiting, self._arrived = getattr(self, "_arrived", []), fresh
        return waiting

    def forget(self: Any, *args: Any) -> Any:
        self._arrived = []
        return resume(self, *args)

    def begin(self: Any, life: str) -> Any:
        self._arrived = []
        return end(self, life)

    return [(Session, "receive", late), (Session, "resume", forget), (Session, "end", begin)]


@mutant("after a reconnect nothing is sent again", world=_HELD_BACK)
def resend_forgotten() -> Patches:
    return [(Lane, "rewind", lambda self: None)]


@mutant("after a reconnect nothing is sent again, and a gap is not noticed", seed=15)
def gap_ignored() -> Patches:
    known = Lane._known

    def jump(self: Any, seq: int, count: int) -> int:
        self.delivered = max(self.delivered, seq - 1)
        return known(self, seq, count)

    return [*resend_forgotten(), (Lane, "_known", jump)]


@mutant("after a reconnect all is sent again, and delivered twice", seed=4)
def duplicates_delivered() -> Patches:
    resume = Session.resume

    def from_the_start(self: Any, peer_life: str, delivered: Any) -> None:
        resume(self, peer_life, (0, 0))

    def on_data(self: Any, frame: Any) -> Any:
        self.delivered += len(frame.items) - self._known(frame.seq, len(frame.items))
        return frame.items

    return [(Session, "resume", from_the_start), (Lane, "on_data", on_data)]


@mutant("an ack is taken for more than it says", world=_HELD_BACK)
def acks_too_much() -> Patches:
    on_ack = Lane.on_ack

    def more(self: Any, seq: int) -> None:
        on_ack(self, min(seq + 1, self._last_seq))

    return [(Lane, "on_ack", more)]


@mutant(
    "a message for a node that never comes waits for ever",
    world=ordinary(  # it does not let the others in for longer than a message may wait
        Freeze(30.0, "rollout-0", 60.0),
        Cut(31.0, "rollout-0"),
        rollout={"num_workers": 2},
        limits=Limits(delivery_s=10.0, dead_s=100.0),
    ),
)
def no_delivery_deadline() -> Patches:
    return [(Session, "expire", lambda self, now: [])]


@mutant("heartbeats never declare a death", world=ordinary(Freeze(60.0, "rollout-0", 200.0)))
def silence_is_no_death() -> Patches:
    tick_open = Peer._tick_open

    def deaf(self: Any) -> None:
        self._heard = True
        tick_open(self)

    return [(Peer, "_tick_open", deaf)]


@mutant(
    "an older process of the same name is let in again",
    world=ordinary(TakeOver(60.0, "unreachable")),
)
def older_process_not_fenced() -> Patches:
    return [(Lives, "admits", lambda self, life: True)]


@mutant("a new life of a peer goes on with the session of the old one", seed=2)
def session_outlives_its_peer() -> Patches:
    return [(Session, "knows_other", lambda self, peer_life: False)]


@mutant(
    "an ask has no deadline (trl#6796)",
    world=ordinary(  # who is asked stands still for longer than an ask may take, and is not dead
        Freeze(30.0, "rollout-0", 80.0),
        rollout={"num_workers": 2},
        weights={"timeout_s": 20.0},
        limits=Limits(dead_s=200.0),
    ),
)
def ask_without_a_deadline() -> Patches:
    return [(Calls, "_set_timer", lambda self, at: None)]


@mutant(
    "asks of a dead process are not ended (trl#5751)",
    world=ordinary(Revive(30.0, REGISTRY, 0.1, after=1)),  # nobody registers with the next one
)
def death_ends_no_ask() -> Patches:
    return [(Calls, "end_all", lambda self, receiver, error: None)]


@mutant(
    "an older life of a worker answers for the newer one",
    world=ordinary(  # what is offered to one life is late, and reaches the next
        Kill(10.0, ("rollout-0",), every_s=3.3, times=15),
        seed=2,
        rollout={"num_workers": 2},
        delays=Delays(step_s=1.0, token_s=0.5, message_s=0.3),
        runtime={"max_restarts": 100, "backoff_first_s": 0.0, "backoff_most_s": 0.0},
    ),
)
def loads_of_any_life() -> Patches:
    begin = WeightLoads.begin

    def unfenced(self: Any, message: Any) -> Any:
        meant_for = self._role.incarnation
        return begin(self, msgspec.structs.replace(message, incarnation=meant_for))

    return [(WeightLoads, "begin", unfenced)]
