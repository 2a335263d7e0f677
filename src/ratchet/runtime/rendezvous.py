"""Where the nodes of one trainer meet, and where their ranks do: a rendezvous for torch's agent.

Consumes a `RankSpec`; produces the store of the agents and that of the ranks. An agent waits for
the other nodes, for `MEET_S` at the start; after that it waits for nobody, but hears from the
others: a node that says that it failed, or that has said nothing for `SILENT_S`, ends this one.

The gang is fixed: so many nodes, each with a number of its own. That needs none of what torch's own
"c10d" rendezvous does, which listens on every interface whatever host it is given, and unpickles
what it finds in its store.

One node: nothing listens. The agent's store is in its memory, and the ranks' is a file in a private
directory. Several nodes: the agent of node 0 serves one TCPStore on exactly the address that
`rendezvous` names. TCPStore knows no authentication and no encryption: whoever reaches that port
can read the addresses of the ranks, disturb the rendezvous or end the run, though not execute code
(its values are plain text here). The ranks' own connections (gloo, NCCL) are no safer. Keep both in
a network of your own.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from ratchet.errors import ConfigError
from ratchet.runtime.placement import RankSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MEET_S: Final = 600.0
"""Seconds in which all nodes of a trainer must have started."""
SILENT_S: Final = 15.0
_BEAT_S: Final = 1.0
_FAILED: Final = "failed: "
_dist: Final[Any] = dist
"""torch's stubs know neither `master_listen_fd` nor `clone`."""


class NodeLost(Exception):  # noqa: N818 - reads as the event it reports
    """Another node of the trainer has failed, or is silent."""


def rank_store(ranks: RankSpec, run_id: str, folder: Path) -> Store:
    """Return the store where the ranks meet, from within a rank."""
    store: Store
    if ranks.num_nodes == 1:
        store = _dist.FileStore(str(folder / "store"), ranks.ranks_per_node)
    else:
        host, port = parse_endpoint(ranks.rendezvous)
        store = _dist.PrefixStore(f"{run_id}/ranks", _connect(host, port))
    return store


def parse_endpoint(text: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT".

    Raises:
        ConfigError: if it is not of that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        msg = (
            f"the rendezvous {text!r} of a trainer with several nodes is not HOST:PORT: name an"
            " address of node 0 and a free port there"
        )
        raise ConfigError(msg)
    return host.removeprefix("[").removesuffix("]"), int(port)


class FixedRendezvous(RendezvousHandler):
    """All nodes of one trainer, each by its number."""

    def __init__(self, ranks: RankSpec, run_id: str) -> None:
        self._ranks = ranks
        self._run_id = run_id
        self._store: Any = None
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
        server = _serve(host, port) if ranks.node_rank == 0 else _connect(host, port)
        self._store = _dist.PrefixStore(f"{self._run_id}/agents", server)
        self._enter()
        beats = server.clone()
        self._beats = threading.Thread(target=self._beat, args=(beats,), daemon=True, name="beats")
        self._beats.start()
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

    def fail(self, detail: str) -> None:
        """Tell the other nodes why this one ends."""
        self._failed = True
        if self._store is not None and self._ranks.num_nodes > 1:
            self._store.set(_word(self._ranks.node_rank), _FAILED + detail)

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
            if word.startswith(_FAILED):
                return f"node {node} of the trainer {word}"
            if now - since > SILENT_S:
                return f"node {node} of the trainer has been silent for {SILENT_S:g} s"
        return None

    def _enter(self) -> None:
        """Check that this is one gang."""
        ranks = self._ranks
        shape = f"{ranks.num_nodes} nodes of {ranks.ranks_per_node} ranks"
        first = self._store.compare_set("shape", "", shape).decode()
        if first != shape:
            msg = f"node {ranks.node_rank} of the trainer has {shape}, another one has {first}"
            raise ConfigError(msg)
        if self._store.add(f"entered/{ranks.node_rank}", 1) != 1:
            msg = f"there are two nodes {ranks.node_rank} of the trainer; number them from 0"
            raise ConfigError(msg)
        every = [f"entered/{node}" for node in range(ranks.num_nodes)]
        self._store.wait(every, timedelta(seconds=MEET_S))

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


BACKEND: Final = "ratchet"


def _serve(host: str, port: int) -> Any:
    """Serve a store on one address only; torch's own server listens on all."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    with closing(listener):
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            msg = (
                f"the rendezvous {host}:{port} cannot be bound: {error.strerror}; it must be an"
                " address of this machine, node 0 of the trainer, and a free port"
            )
            raise ConfigError(msg) from None
        listener.listen(128)
        return _dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=MEET_S),
            master_listen_fd=listener.detach(),
        )


def _connect(host: str, port: int) -> Any:
    return _dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=MEET_S)
    )
