"""Weights straight into inference servers: each server's own processes in a group with the trainer.

The worker of such an engine moves no bytes: it asks its servers to join, and to take each bucket.
Each engine has a lane of its own, as one that is lost would take the others with it. For engines
that serve through another program, where nothing can pass through the worker: NCCL refuses two
processes on one device.
"""

from __future__ import annotations

from functools import partial

from ratchet.transport.weights.direct_receiver import DirectReceiver
from ratchet.transport.weights.registry import Transport
from ratchet.transport.weights.sender import Sender


def transport() -> Transport:
    """Return both ends."""
    return Transport(partial(Sender, "direct"), DirectReceiver)
