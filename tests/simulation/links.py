"""What must hold of the links between the processes of a world, whatever they carry.

Consumes the nodes as they are at one moment; produces what is wrong. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.sessions import Host, Network

    from ratchet.transport.mailbox.peer import Peer


class Links:
    """Looks at all links.

    Args:
        network: whose.
        exact: what a stopped process has written is not held back, so that its silence is heard.
    """

    def __init__(self, network: Network, *, exact: bool) -> None:
        self._network = network
        self._exact = exact

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield each invariant that is broken, and how."""
        now = self._network.loop.now
        for host in self._network.living().values():
            for peer in host.node._peers.values():
                yield from self._counted(host, peer)
                # who was stopped itself is about to look at the time
                if host.process.runs and host.thawed_at < now - self.patience_s:
                    yield from self._in_time(host, peer)

    @property
    def _slack_s(self) -> float:
        return 3 * self._network.limits.heartbeat_s

    @property
    def patience_s(self) -> float:
        """After so much silence a peer is given up."""
        return 1.1 * self._network.limits.dead_s + self._slack_s

    def _counted(self, host: Host, peer: Peer) -> Iterator[tuple[str, str]]:
        """Each piece that is acknowledged was handed over, once, if its message is whole."""
        handed, acknowledged = host.node.num_delivered[peer.session_key], peer.session.delivered
        part = any(lane._assembly is not None for lane in peer.session._lanes)
        if handed > sum(acknowledged) or (handed < sum(acknowledged) and not part):
            yield "I3", f"{host.name} was handed {handed} of {acknowledged} from {peer.name}"

    def _in_time(self, host: Host, peer: Peer) -> Iterator[tuple[str, str]]:
        """What waits for a peer comes back after its time; a silent peer is given up."""
        now = self._network.loop.now
        overdue = host.process.local(now) - self._slack_s
        for wait in host.node.waits():
            if wait.until < overdue:
                yield "I6", f"{host.name} waits too long: {wait}"
        queues = [lane.queue for lane in peer.session._lanes]
        if any(queue[0].deadline < overdue and not queue[0].begun for queue in queues if queue):
            yield "I6", f"{host.name} still wants to tell {peer.name} something"
        other = self._network.hosts.get(peer.name)
        if other is None or other.incarnation != peer.lives.present or other.stopped_at is None:
            return
        silent = other.lives and other.stopped_at < now - self.patience_s
        if self._exact and peer.connected and silent:
            yield "I6", f"{host.name} holds on to {peer.name}, which is silent"
