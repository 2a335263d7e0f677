"""Weights by broadcast: all engines in one group, which is kept while its members stay the same.

Each bucket leaves the trainer once, and the group passes it on. A lost member breaks the group for
all, so the transfer goes on in another one, from the first part that any of the others lacks.
"""

from __future__ import annotations

from functools import partial

from ratchet.transport.weights.receiver import Receiver
from ratchet.transport.weights.registry import Transport
from ratchet.transport.weights.sender import Sender


def transport() -> Transport:
    """Return both ends."""
    return Transport(partial(Sender, "broadcast"), partial(Receiver, "broadcast"))
