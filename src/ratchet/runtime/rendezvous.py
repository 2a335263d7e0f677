"""Where the nodes of one trainer meet, and where their ranks do: a rendezvous for torch's agent.

Consumes a `RankSpec`; produces the store of the agents and that of the ranks. An agent waits for
the other nodes, for `MEET_S` at the start; after that it waits for nobody, but hears from the
others: a node that says that it failed, or that has said nothing for `SILENT_S`, ends this one.

The gang is fixed: so many nodes, each with a number of its own. That needs none of what torch's own
"c10d" rendezvous does, which listens on every interface whatever host it is given, and unpickles
what it finds in its store.

A gang lives as long as the store that it met in, and ends as a whole. Its launchers start it again,
each its own node: whoever is sooner than node 0 finds its number taken in the old store, and waits
for the end of that. Ranks meet under a name of their gang's, so that one left from the gang before
disturbs nobody.

One node: nothing listens. The agent's store is in its memory, and the ranks' is a file in a private
directory. Several nodes: the agent of node 0 serves one TCPStore on exactly the address that
`rendezvous` names. TCPStore knows no authentication and no encryption: whoever reaches that port
can read the addresses of the ranks, disturb the rendezvous or end the run, though not execute code
(its values are plain text here). The ranks' own connections (gloo, NCCL) are no safer. Keep both in
a network of your own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from ratchet.errors import ConfigError
from ratchet.runtime.gang_store import MEET_S, connect, parse_endpoint, serve
from ratchet.runtime.placement import RankSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

SILENT_S: Final = 15.0
LIFE: Final = "RATCHET_GANG"
"""Environment variable of the ranks with the name of their gang."""
FOR_GOOD: Final = "failed for good: "
"""Another life of the gang would end in the same way."""
_BEAT_S: Final = 1.0
_FAILED: Final = "failed: "
_dist: Final[Any] = dist
"""torch's stubs do not know `clone`."""


class NodeLost(Exception):  # noqa: N818 - reads as the event it reports
    """Another node of the trainer has failed, or is silent."""


def rank_store(ranks: RankSpec, run_id: str, folder: Path) -> Store:
    """Return the store where the ranks meet, from within a rank."""
    store: Store
    if ranks.num_nodes == 1:
        store = _dist.FileStore(str(folder / "store"), ranks.ranks_per_node)
    else:
        host, port = parse_endpoint(ranks.rendezvous)
        life = os.environ[LIFE]
        store = _dist.PrefixStore(f"{run_id}/ranks/{life}", connect(host, port))
    return store


class FixedRendezvous(RendezvousHandler):
    """All nodes of one trainer, each by its number."""

    def __init__(self, ranks: RankSpec, run_id: str) -> None:
        self._ranks = ranks
        self._run_id = run_id
        self._store: Any = None
        self._met_at = 0.0
        self._heard: dict[int, tuple[str, float]] = {}
        """node -> its last word, and when that was new"""
        self._failed = False
        self._closed = threading.Event()
        self._beats: threading.Thread | None = None

    def close(self) -> None:
        """Fall silent; wait for the thread that says that this node lives."""
        self._closed.set()
        if self._beats is not None:
            self._beats.join()

    # --- what the agent asks

    def get_backend(self) -> str:
        """Return the name under which the handler is registered."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """The ranks find their store themselves."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for all nodes.

        Raises:
            ConfigError: if two nodes have the same number, or they disagree about the gang.
            RuntimeError: of torch, if node 0 cannot be reached in time.
        """
        ranks = self._ranks
        if ranks.num_nodes == 1:
            self._store = _dist.HashStore()
            here = RendezvousStoreInfo("127.0.0.1", 0)
            return RendezvousInfo(self._store, 0, 1, here)
        host, port = parse_endpoint(ranks.rendezvous)
        server = serve(host, port) if ranks.node_rank == 0 else self._join(host, port)
        self._store = self._agents(server)
        if ranks.node_rank == 0:
            self._enter(self._store)
        os.environ[LIFE] = self._store.compare_set("life", "", uuid.uuid4().hex).decode()
        self._beats = threading.Thread(
            target=self._beat, args=(server.clone(),), daemon=True, name="beats"
        )
        self._beats.start()
        every = [_entered(node) for node in range(ranks.num_nodes)]
        self._store.wait(every, timedelta(seconds=MEET_S))
        self._met_at = time.monotonic()
        return RendezvousInfo(
            self._store, ranks.node_rank, ranks.num_nodes, RendezvousStoreInfo(host, port)
        )

    def num_nodes_waiting(self) -> int:
        """Return 0, as nobody joins a fixed gang. The agent asks often, and so hears of the others.

        Raises:
            NodeLost: if another node is to be given up.
        """
        failure = self.failure_elsewhere()
        if failure is not None:
            raise NodeLost(failure)
        return 0

    def is_closed(self) -> bool:
        """Nobody closes it: it is of one use only."""
        return False

    def set_closed(self) -> None:
        """Nothing to do."""

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to do: the store goes with the process, and news of the others may still come."""
        return True

    # --- between the nodes

    def fail(self, detail: str, *, for_good: bool = False) -> None:
        """Tell the other nodes why this one ends; node 0 leaves them the time to hear of it."""
        self._failed = True
        if self._store is not None and self._ranks.num_nodes > 1:
            word = (FOR_GOOD if for_good else _FAILED) + detail
            with contextlib.suppress(RuntimeError):  # node 0 is gone, and the store with it
                self._store.set(_word(self._ranks.node_rank), word)
            if self._ranks.node_rank == 0:
                self._closed.wait(2 * _BEAT_S)  # the store goes with this process

    def hear(self, within_s: float) -> str | None:
        """Wait a little for the news that another node failed; None if there is none."""
        end = time.monotonic() + within_s
        while (failure := self.failure_elsewhere()) is None and time.monotonic() < end:
            time.sleep(0.05)
        return failure

    def failure_elsewhere(self) -> str | None:
        """Return what is known of a node that failed or fell silent."""
        now = time.monotonic()
        for node, (word, since) in list(self._heard.items()):
            if word.startswith((_FAILED, FOR_GOOD)):
                return f"node {node} of the trainer {word}"
            if now - max(since, self._met_at) > SILENT_S:
                return f"node {node} of the trainer has been silent for {SILENT_S:g} s"
        return None

    def _agents(self, server: Any) -> Any:
        return _dist.PrefixStore(f"{self._run_id}/agents", server)

    def _join(self, host: str, port: int) -> Any:
        """Enter the gang of node 0: the next one, if this node has been in the one that is there.

        Raises:
            ConfigError: if two nodes have the same number, or they disagree about the gang.
            NodeLost: if node 0 does not begin anew in time.
            RuntimeError: of torch, if node 0 cannot be reached in time.
        """
        end = time.monotonic() + MEET_S
        while time.monotonic() < end:
            server = connect(host, port)
            with contextlib.suppress(RuntimeError):  # the store has gone
                store = self._agents(server)
                if self._enter(store):
                    return server
                self._until_gone(store, end)
        raise NodeLost(f"node 0 of the trainer is still in the gang of before, after {MEET_S:g} s")

    def _until_gone(self, store: Any, end: float) -> None:
        """Wait for the end of a gang in which this node's number is taken: by itself, before it was
        started again; or by another, who lives.
        """
        mine = self._ranks.node_rank
        words: set[str] = set()
        while time.monotonic() < end:
            word = store.get(_word(mine)).decode() if store.check([_word(mine)]) else ""
            words.update([word] if word.isdecimal() else [])
            if len(words) > 1:
                msg = f"there are two nodes {mine} of the trainer; number them from 0"
                raise ConfigError(msg)
            time.sleep(_BEAT_S)

    def _enter(self, store: Any) -> bool:
        """Take the place of this node in the gang of a store; False if it is taken.

        Raises:
            ConfigError: if the nodes disagree about the gang.
        """
        ranks = self._ranks
        shape = f"{ranks.num_nodes} nodes of {ranks.ranks_per_node} ranks"
        first = store.compare_set("shape", "", shape).decode()
        if first != shape:
            msg = f"node {ranks.node_rank} of the trainer has {shape}, another one has {first}"
            raise ConfigError(msg)
        return bool(store.add(_entered(ranks.node_rank), 1) == 1)

    def _beat(self, server: Any) -> None:
        """Say that this node lives and hear from the others; node 0 from all, all from node 0."""
        store = _dist.PrefixStore(f"{self._run_id}/agents", server)
        mine = self._ranks.node_rank
        others = [0] if mine else range(1, self._ranks.num_nodes)
        self._heard = dict.fromkeys(others, ("", time.monotonic()))
        beats = itertools.count(1)
        while not self._closed.wait(_BEAT_S):
            try:
                if not self._failed:
                    store.set(_word(mine), str(next(beats)))
                for node in others:
                    if store.check([_word(node)]):
                        self._hear(node, store.get(_word(node)).decode())
            except RuntimeError:
                self._hear(0, f"{_FAILED}its rendezvous is gone")
                return

    def _hear(self, node: int, word: str) -> None:
        if word != self._heard[node][0]:
            self._heard[node] = (word, time.monotonic())


def _word(node: int) -> str:
    return f"word/{node}"


def _entered(node: int) -> str:
    return f"entered/{node}"


BACKEND: Final = "ratchet"
