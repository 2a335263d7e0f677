from __future__ import annotations

from ratchet.errors import ActorDead, AuthFailed, ProtocolError
from ratchet.transport.mailbox.address import Address
from ratchet.transport.mailbox.refusal import Refusal

HERE, THERE = Address("tcp", "127.0.0.1", 1), Address("tcp", "127.0.0.1", 2)


class Scene:
    def __init__(self) -> None:
        self.now = 100.0
        self.where: Address | None = HERE
        self.refusal = Refusal(lambda: self.where, lambda: self.now)


def test_at_first_there_is_none() -> None:
    assert Scene().refusal.error is None


def test_a_wrong_key_counts_until_the_peer_listens_elsewhere() -> None:
    scene, error = Scene(), AuthFailed("wrong key")
    scene.refusal.note(error, HERE, 5.0)
    scene.now += 1e6
    assert scene.refusal.error is error
    scene.where = None  # nobody knows where
    assert scene.refusal.error is error
    scene.where = THERE
    assert scene.refusal.error is None
    scene.where = HERE
    assert scene.refusal.error is None  # it is dialled again, and will say so again


def test_another_protocol_is_the_same_everywhere() -> None:
    scene, error = Scene(), ProtocolError("speaks version 2")
    scene.refusal.note(error, HERE, 5.0)
    scene.where, scene.now = THERE, 1e6
    assert scene.refusal.error is error


def test_who_was_replaced_asks_again_in_time() -> None:
    scene, error = Scene(), ActorDead("replaced")
    scene.refusal.note(error, HERE, 5.0)
    scene.now += 4.9
    assert scene.refusal.error is error
    scene.now += 0.1
    assert scene.refusal.error is None


def test_the_end_of_this_node_is_for_good() -> None:
    scene, error = Scene(), ActorDead("stopped")
    scene.refusal.note(error)
    scene.now, scene.where = 1e9, THERE
    assert scene.refusal.error is error


def test_who_is_there_after_all_has_refused_nothing() -> None:
    scene = Scene()
    scene.refusal.note(AuthFailed("wrong key"), HERE, 5.0)
    scene.refusal.forget()
    assert scene.refusal.error is None
