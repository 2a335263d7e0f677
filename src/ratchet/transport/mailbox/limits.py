"""Sizes and times of a link. Consumes nothing, waits for nothing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Sizes and times of a link. Both ends of a run use the same."""

    hello_bytes: int = 4096
    """largest frame from a peer that has not proved itself"""
    frame_bytes: int = 1 << 20
    fragment_bytes: int = 256 << 10
    """a longer message travels in pieces of this size, and control messages go in between"""
    message_bytes: int = 256 << 20
    """largest message; the sender refuses a larger one, the receiver ends the link"""
    depth: int = 64
    """deepest nesting of a message that is free in form"""
    connections: int = 256
    """open at once, strangers included; when all are taken, a new one displaces a stranger"""
    window_messages: int = 4096
    """pieces that may be unacknowledged, per lane"""
    window_bytes: int = 16 << 20
    queue_messages: int = 1 << 18
    """messages that may wait for a peer, per lane; more become dead letters"""
    queue_bytes: int = 1 << 30
    hello_s: float = 5.0
    heartbeat_s: float = 1.0
    suspect_s: float = 5.0
    """silence after which the log says that the peer's loop does not respond"""
    dead_s: float = 15.0
    """silence, or absence without proof of death, after which the peer counts as dead"""
    delivery_s: float = 30.0
    """a message not on its way to its receiver by then becomes a dead letter"""
    ack_delay_s: float = 0.002
    """how long an acknowledgement waits for a frame that could carry it"""
    dial_first_s: float = 0.02
    dial_most_s: float = 0.5
