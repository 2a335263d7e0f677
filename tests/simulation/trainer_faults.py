"""What can go wrong with the trainer that leads, and with those that take over from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tests.simulation.faults import Fault

from ratchet.actors.role import TRAINER

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(frozen=True)
class TakeOver(Fault):
    """Another trainer starts; the old one is dead, or lives on where nobody can reach it, or beside
    the new one.
    """

    old: Literal["dead", "unreachable", "beside"]

    def strike(self, world: World) -> None:
        if world.ended.event.is_set() or world.over:
            return
        if self.old == "dead":
            old = world.leader
            old.end.kill()
            world.start_trainer(TRAINER)
            old.killed = True
            return
        name = f"trainer-{len(world.trainers)}" if self.old == "beside" else TRAINER
        world.start_trainer(name)


@dataclass(frozen=True)
class KillTrainer(Fault):
    """The leading trainer dies, perhaps with its machine; its launcher starts it again, or whoever
    looks after one that has taken over does.
    """

    power: bool = False

    def strike(self, world: World) -> None:
        if world.ended.event.is_set() or world.over:
            return
        leader = world.leader
        leader.end.kill()
        if world.checkpoints is not None and self.power:
            world.checkpoints.disk.lose_power()
        if not any(each.goes_on and leader in each.lives for each in world.trainer_launchers):
            world.start_trainer(leader.name)


@dataclass(frozen=True)
class LoseNode(Fault):
    """The machine of the leading trainer is gone, and its launcher with it: a standby takes over,
    if there is something to go on from.
    """

    def strike(self, world: World) -> None:
        leader = world.leader
        launchers = world.trainer_launchers
        nodes = [each for each in launchers if leader in each.lives and each.host.lives]
        watched = world.standby is not None and world.standby.watches
        if nodes and watched and not world.over and world.store.newest_live() is not None:
            nodes[0].lose_node()
