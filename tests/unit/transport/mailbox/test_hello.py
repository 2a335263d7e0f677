"""The hello: who is let in, who is not, and that nobody else is, whatever the bytes."""

from __future__ import annotations

import os
import random

import msgspec
import pytest
from tests.helpers.nodes import KEY, feed

from ratchet.errors import ActorDead, AuthFailed, ProtocolError
from ratchet.transport.mailbox.codec import pack, unpack_hello
from ratchet.transport.mailbox.frames import (
    PROTOCOL,
    Hello,
    HelloFrame,
    Proof,
    Reject,
    Resume,
    Welcome,
)
from ratchet.transport.mailbox.hello import Handshake, Identity, Refused
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.peer_files import PeerFiles
from ratchet.transport.mailbox.reader import FrameReader
from ratchet.transport.mailbox.session import Session
from ratchet.transport.mailbox.shared import FileName, make_probe

OTHER_KEY = bytes(reversed(KEY))


def make(
    name: str,
    *,
    wanted: str | None = None,
    key: bytes = KEY,
    run_id: str = "run",
    session: Session | None = None,
    nonce: bytes | None = None,
    probe: FileName | None = None,
) -> Handshake:
    own = session or Session(f"{name}-life", Limits())
    nonce = nonce or (b"d" if wanted else b"l") * 32
    return Handshake(
        Identity(name, f"{name}/1", run_id, key),
        nonce,
        lambda hello: own,
        wanted=wanted,
        probe=probe,
    )


def decode(data: bytes | bytearray | None) -> HelloFrame:
    assert data is not None
    (frame,) = feed(FrameReader(4096), data)
    return unpack_hello(frame)


def steps(dialler: Handshake, listener: Handshake) -> list[HelloFrame]:
    """Let the two talk to the end; return the frames that went over."""
    frames = [decode(dialler.first())]
    ends = (listener, dialler)
    while True:
        reply = ends[(len(frames) - 1) % 2].receive(frames[-1])
        if reply is None:
            return frames
        frames.append(decode(reply))


def test_both_ends_know_each_other_and_where_they_were() -> None:
    mine, theirs = Session("a-life", Limits()), Session("b-life", Limits())
    theirs.peer_life = "a-life"
    dialler = make("a", wanted="b", session=mine)
    listener = make("b", session=theirs)
    frames = steps(dialler, listener)
    assert [type(frame) for frame in frames] == [Hello, Hello, Proof, Proof, Resume, Welcome]
    assert dialler.done
    assert listener.done
    for end, peer in ((dialler, "b"), (listener, "a")):
        assert end.peer is not None
        assert end.peer.name == peer
        assert end.peer.incarnation == f"{peer}/1"
        assert end.peer_life == f"{peer}-life"
        assert end.delivered == (0, 0)
    assert dialler.dials
    assert not listener.dials


@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("lends", [True, False])
def test_each_end_hears_whether_its_files_can_be_read(*, lends: bool, reads: bool) -> None:
    file = make_probe()
    assert file is not None
    dialler, listener = make("a", wanted="b", probe=file.name), make("b", probe=file.name)
    here, elsewhere = PeerFiles(os.getpid()), PeerFiles(1 << 30)
    dialler.on_this_host(here if reads else elsewhere)
    listener.on_this_host(here if lends else elsewhere)
    steps(dialler, listener)
    assert (dialler.lends, dialler.readable) == (lends, here if reads else None)
    assert (listener.lends, listener.readable) == (reads, here if lends else None)


def test_an_end_on_another_host_is_told_of_no_file() -> None:
    dialler, listener = make("a", wanted="b", probe=FileName(3, 4)), make("b")
    listener.on_this_host(PeerFiles(os.getpid()))
    steps(dialler, listener)
    assert listener.peer is not None
    assert listener.peer.probe is None


def test_what_a_peer_names_is_not_opened_before_it_has_proved_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[FileName] = []
    monkeypatch.setattr(PeerFiles, "can_read", lambda self, probe: bool(opened.append(probe)))
    named = FileName(0, 1)
    dialler, listener = make("a", wanted="b", probe=named), make("b", key=OTHER_KEY)
    for end in (dialler, listener):
        end.on_this_host(PeerFiles(os.getpid()))
    with pytest.raises(Refused, match="same key"):
        steps(dialler, listener)
    assert not opened
    dialler, listener = make("a", wanted="b"), make("b", probe=named)
    for end in (dialler, listener):
        end.on_this_host(PeerFiles(os.getpid()))
    steps(dialler, listener)
    assert opened == [named]
    assert not listener.lends


def test_files_that_were_out_of_reach_are_not_tried_again() -> None:
    file, session = make_probe(), Session("b-life", Limits())
    assert file is not None
    session.may_read = False
    dialler, listener = make("a", wanted="b", probe=file.name), make("b", session=session)
    for end in (dialler, listener):
        end.on_this_host(PeerFiles(os.getpid()))
    steps(dialler, listener)
    assert not dialler.lends
    assert listener.peer is not None
    assert listener.peer.probe == file.name


def test_each_end_hears_what_the_other_has_of_this_life() -> None:
    class Known(Session):
        def delivered_of(self, peer_life: str) -> tuple[int, int]:
            return {"a-life": (3, 4), "b-life": (5, 6)}[peer_life]

    dialler = make("a", wanted="b", session=Known("a-life", Limits()))
    listener = make("b", session=Known("b-life", Limits()))
    steps(dialler, listener)
    assert dialler.delivered == (3, 4)
    assert listener.delivered == (5, 6)


def test_another_key_is_refused_by_the_listener() -> None:
    with pytest.raises(Refused, match="a and b do not hold the same key") as caught:
        steps(make("a", wanted="b", key=OTHER_KEY), make("b"))
    assert isinstance(caught.value.as_error(), AuthFailed)
    assert caught.value.final


def test_a_listener_that_cannot_prove_itself_is_refused() -> None:
    dialler = make("a", wanted="b")
    listener = make("b", key=OTHER_KEY)
    hello = listener.receive(decode(dialler.first()))
    dialler.receive(decode(hello))
    with pytest.raises(Refused, match="same key") as caught:
        dialler.receive(Proof(b"x" * 32, "life", (0, 0)))
    assert isinstance(caught.value.as_error(), AuthFailed)
    assert not dialler.done


def test_no_key_at_all_is_refused() -> None:
    dialler, listener = make("a", wanted="b"), make("b")
    listener.receive(decode(dialler.first()))
    with pytest.raises(Refused, match="same key"):
        listener.receive(Proof(b"", "life", (0, 0)))


def test_a_proof_of_the_other_role_is_no_proof() -> None:
    dialler, listener = make("a", wanted="b"), make("b")
    dialler.receive(decode(listener.receive(decode(dialler.first()))))
    with pytest.raises(Refused, match="same key"):
        dialler.receive(Proof(dialler._mac("dialler"), "life", (0, 0)))


def test_a_recorded_proof_fits_no_other_connection() -> None:
    hello, _, proof, *_ = steps(make("a", wanted="b"), make("b"))
    later = make("b", nonce=b"m" * 32)
    later.receive(hello)
    with pytest.raises(Refused, match="same key"):
        later.receive(proof)


def test_another_protocol_version_is_refused_with_both_named() -> None:
    hello = Hello(7, "a", "b", "a/1", "run", b"n" * 32)
    with pytest.raises(
        Refused, match=f"a speaks link protocol 7 and b speaks {PROTOCOL}"
    ) as caught:
        make("b").receive(hello)
    assert isinstance(caught.value.as_error(), AuthFailed)


def test_another_run_is_refused_with_both_named() -> None:
    with pytest.raises(Refused, match="a is of run 'other' and b of 'run'") as caught:
        steps(make("a", wanted="b", run_id="other"), make("b"))
    assert isinstance(caught.value.as_error(), AuthFailed)


def test_a_dialler_that_does_not_know_the_run_learns_it_from_a_listener_with_the_key() -> None:
    dialler, listener = make("a", wanted="b", run_id=""), make("b")
    steps(dialler, listener)
    assert dialler.done
    assert listener.done
    assert dialler.peer is not None
    assert dialler.peer.run_id == "run"
    for key, other in ((OTHER_KEY, KEY), (KEY, OTHER_KEY)):
        with pytest.raises(Refused, match="same key"):
            steps(make("a", wanted="b", run_id="", key=key), make("b", key=other))


def test_a_listener_does_not_learn_its_run_from_who_dials() -> None:
    with pytest.raises(Refused, match="a is of run 'run' and b of ''"):
        steps(make("a", wanted="b"), make("b", run_id=""))


def test_a_run_that_was_changed_on_the_way_is_no_proof() -> None:
    dialler, listener = make("a", wanted="b", run_id=""), make("b")
    hello = decode(listener.receive(decode(dialler.first())))
    forged = msgspec.structs.replace(hello, run_id="another")
    with pytest.raises(Refused, match="same key"):
        listener.receive(decode(dialler.receive(forged)))


@pytest.mark.parametrize("kind", ["tls", "key", "run", "protocol"])
def test_what_cannot_be_mended_by_dialling_again_is_final(kind: str) -> None:
    refusal = Refused(kind, "why")
    assert refusal.final
    assert isinstance(refusal.as_error(), AuthFailed)


def test_another_name_is_not_there_yet() -> None:
    with pytest.raises(Refused, match="c is not at this address") as caught:
        steps(make("a", wanted="c"), make("b"))
    assert not caught.value.final


def test_the_peers_refusal_reaches_the_dialler() -> None:
    with pytest.raises(Refused, match="b refuses the link: because") as caught:
        make("a", wanted="b").receive(Reject("key", "because"))
    assert caught.value.by_peer
    assert isinstance(caught.value.as_error(), AuthFailed)
    replaced = Refused("replaced", "by a newer one")
    assert replaced.final
    assert isinstance(replaced.as_error(), ActorDead)
    unknown = Refused("no such kind", "whatever")
    assert not unknown.final
    assert isinstance(unknown.as_error(), ProtocolError)


@pytest.mark.parametrize(
    "frames",
    [
        [Proof(b"m", "life", (0, 0))],
        [Resume((0, 0))],
        [Hello(PROTOCOL, "a", "b", "a/1", "run", b"n" * 32)] * 2,
        [Hello(PROTOCOL, "a", "b", "a/1", "run", b"n" * 32), Resume((0, 0))],
        [Hello(PROTOCOL, "a", "b", "a/1", "run", b"n" * 31)],
        [Hello(PROTOCOL, "", "b", "a/1", "run", b"n" * 32)],
    ],
)
def test_frames_out_of_turn_or_form_are_refused(frames: list[HelloFrame]) -> None:
    listener = make("b")
    for frame in frames[:-1]:
        listener.receive(frame)
    with pytest.raises(ProtocolError):
        listener.receive(frames[-1])
    assert not listener.done


@pytest.mark.parametrize("who", ["dialler", "listener"])
def test_a_session_given_up_during_the_hello_is_not_resumed(who: str) -> None:
    sessions = {"dialler": Session("a1", Limits()), "listener": Session("b1", Limits())}
    dialler = make("a", wanted="b", session=sessions["dialler"])
    listener = make("b", session=sessions["listener"])
    proof = dialler.receive(decode(listener.receive(decode(dialler.first()))))
    resume = dialler.receive(decode(listener.receive(decode(proof))))
    assert not dialler.done  # and sends nothing yet that could be lost with a life
    sessions[who].end("another")
    with pytest.raises(ProtocolError, match="given up during the hello"):
        dialler.receive(decode(listener.receive(decode(resume))))
    assert not dialler.done


def test_nothing_but_the_key_opens_the_link() -> None:
    """Thousands of mutated frames, in every turn of the hello: none gets a stranger in."""
    rng = random.Random(0)
    honest = [bytes(pack(frame)) for frame in steps(make("a", wanted="b"), make("b"))]
    for _ in range(3000):
        listener = make("b", nonce=rng.randbytes(32))
        reader = FrameReader(Limits().hello_bytes)
        stream = bytearray(b"".join([honest[0], *rng.choices([*honest, honest[2]], k=3)]))
        for _ in range(rng.randrange(4)):
            stream[rng.randrange(len(stream))] = rng.randrange(256)
        try:
            for frame in feed(reader, stream):
                listener.receive(unpack_hello(frame))
        except (Refused, ProtocolError):
            pass
        assert not listener.done
        assert not listener.peer_life


def test_the_key_is_in_no_text() -> None:
    identity = Identity("a", "a/1", "run", KEY)
    for text in (repr(identity), str(identity)):
        assert KEY.hex() not in text
        assert repr(KEY) not in text
    wire = b"".join(bytes(pack(frame)) for frame in steps(make("a", wanted="b"), make("b")))
    assert KEY not in wire
    assert msgspec.msgpack.encode(KEY) not in wire
