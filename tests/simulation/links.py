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
        self._stopped: dict[str, float] = {}
        """since when, as seen from here, by incarnation"""

    def check(self) -> Iterator[tuple[str, str]]:
        """Yield each invariant that is broken, and how."""
        now = self._network.loop.now
        living = self._network.living().values()
        for host in living:
            if host.process.runs:
                self._stopped.pop(host.incarnation, None)
            else:
                self._stopped.setdefault(host.incarnation, now)
        for host in living:
            for peer in host.node._peers.values():
                yield from self._counted(host, peer)
                # who was stopped itself is about to look at the time
                if host.process.runs and host.thawed_at < now - self._patience_s:
                    yield from self._in_time(host, peer)

    @property
    def _slack_s(self) -> float:
        return 3 * self._network.limits.heartbeat_s

    @property
    def _patience_s(self) -> float:
        return 1.3 * self._network.limits.dead_s + self._slack_s

    def _counted(self, host: Host, peer: Peer) -> Iterator[tuple[str, str]]:
        """Each piece that is acknowledged was handed over, once."""
        handed, acknowledged = host.node.num_delivered[peer.session_key], peer.session.delivered
        if handed != sum(acknowledged):
            yield "I3", f"{host.name} was handed {handed} of {acknowledged} from {peer.name}"

    def _in_time(self, host: Host, peer: Peer) -> Iterator[tuple[str, str]]:
        """What waits for a peer comes back after its time; a silent peer is given up."""
        now = self._network.loop.now
        overdue = host.process.local(now) - self._slack_s
        queues = [lane.queue for lane in peer.session._lanes]
        if any(queue[0].deadline < overdue and not queue[0].begun for queue in queues if queue):
            yield "I6", f"{host.name} still wants to tell {peer.name} something"
        since = self._stopped.get(peer.incarnation or "", now)
        if self._exact and peer.connected and since < now - self._patience_s:
            yield "I6", f"{host.name} holds on to {peer.name}, which is silent"
