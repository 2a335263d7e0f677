"""Weights point to point: each engine in a pair with the trainer, on a thread of its own.

Each bucket is gathered once and leaves the trainer once for each engine. Nothing that one engine
does holds another up, and pairs of engines that stay are kept. Catching up goes this way under
every transport.
"""

from __future__ import annotations

from functools import partial

from ratchet.transport.weights.receiver import Receiver
from ratchet.transport.weights.registry import Transport
from ratchet.transport.weights.sender import Sender


def transport() -> Transport:
    """Return both ends."""
    return Transport(partial(Sender, "p2p"), partial(Receiver, "p2p"))
