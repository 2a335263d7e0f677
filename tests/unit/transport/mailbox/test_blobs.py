from __future__ import annotations

import msgspec
import pytest
from tests.helpers.groups import finished, ready

from ratchet.errors import ProtocolError
from ratchet.messages import AbortLoad, Message
from ratchet.transport.mailbox.blobs import ARRAY_BYTES, LEAST_BYTES, put_in, take_out
from ratchet.transport.mailbox.codec import decode_envelope, encode_envelope, encode_parcel
from ratchet.transport.mailbox.frames import Tell
from ratchet.transport.mailbox.shared import SHARED_BYTES

LARGE = ARRAY_BYTES // 4


@pytest.mark.parametrize(
    ("message", "slots"),
    [
        (finished(LARGE), (1, 2)),
        (finished(10, LARGE, 0, LARGE + 1), (5, 6, 13, 14)),
        (ready(3, LARGE), (9, 10, 13, 14)),
    ],
)
def test_a_message_is_whole_again_without_a_copy_of_its_arrays(
    message: Message, slots: tuple[int, ...]
) -> None:
    light, found, arrays = take_out(message)
    assert found == slots
    assert len(msgspec.msgpack.encode(light)) < ARRAY_BYTES
    assert all(len(array) >= ARRAY_BYTES for array in arrays)
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(light), type=type(message))
    assert copy != message
    put_in(copy, slots, arrays)
    assert copy == message
    assert take_out(copy)[2][0] is arrays[0]


@pytest.mark.parametrize(
    "message", [finished(LARGE - 1, 0), finished(), ready(), AbortLoad(1, 2, "")]
)
def test_small_arrays_stay_where_they_are(message: Message) -> None:
    assert take_out(message) == (message, (), ())


def test_smaller_ones_leave_a_message_of_which_much_is_shared() -> None:
    small = LEAST_BYTES // 4
    message = finished(small, small - 1, SHARED_BYTES // 4)
    assert take_out(message)[1] == (1, 2, 9, 10)
    assert take_out(finished(small, LARGE))[1] == (5, 6)
    assert take_out(finished(*[small] * (SHARED_BYTES // 4 // small // 2)))[1][:3] == (1, 2, 5)


def test_what_may_change_while_it_waits_is_copied_at_once() -> None:
    message = finished(LARGE)
    data = bytearray(message.group.rollouts[0].completion_ids.data)
    msgspec.structs.force_setattr(message.group.rollouts[0].completion_ids, "data", data)
    assert take_out(message)[1] == (2,)


def test_a_parcel_survives_its_envelope() -> None:
    message = finished(5, LARGE)
    head, arrays = encode_parcel(Tell("a", "b", "t", 3, message))
    assert len(head) < 1000
    assert len(arrays) == 2
    assert decode_envelope(head, arrays) == Tell("a", "b", "t", 3, message)


def test_a_message_without_large_arrays_is_one_piece() -> None:
    envelope = Tell("a", "b", "t", 3, finished(5))
    assert encode_parcel(envelope) == (encode_envelope(envelope), ())


def test_what_is_no_message_is_no_parcel() -> None:
    broken = msgspec.structs.replace(finished(1), group=None, stats=object())
    with pytest.raises(ProtocolError, match="GroupFinished cannot be encoded"):
        encode_parcel(Tell("a", "b", None, None, broken))


@pytest.mark.parametrize(
    ("slots", "num_arrays"),
    [((1,), 2), ((1, 2, 5), 2), ((1, 1), 2), ((0, 1), 2), ((-3, 2), 2), ((1, 4), 2), ((), 1)],
)
def test_arrays_that_are_not_those_of_the_message_are_refused(
    slots: tuple[int, ...], num_arrays: int
) -> None:
    light, _, arrays = take_out(finished(LARGE))
    with pytest.raises(ValueError, match=r"arrays were announced|no place"):
        put_in(light, slots, (arrays * 2)[:num_arrays])


def test_a_head_without_its_arrays_is_refused() -> None:
    head, arrays = encode_parcel(Tell("a", "b", None, None, finished(LARGE)))
    for wrong in ((), arrays[:1], (*arrays, arrays[0])):
        with pytest.raises(ProtocolError, match="not an envelope"):
            decode_envelope(head, wrong)
    with pytest.raises(ProtocolError, match="not an envelope"):
        decode_envelope(encode_envelope(Tell("a", "b", None, None, finished(1))), arrays)
