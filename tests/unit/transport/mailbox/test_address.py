from __future__ import annotations

import pytest

from ratchet.errors import ConfigError
from ratchet.transport.mailbox.address import Address


@pytest.mark.parametrize(
    "text", ["unix:/run/x/buffer.sock", "tcp:127.0.0.1:0", "tcp:127.8.8.8:65535", "tcp:[::1]:80"]
)
def test_an_address_survives_its_text(text: str) -> None:
    assert str(Address.parse(text)) == text


def test_localhost_is_a_loopback_address() -> None:
    assert Address.parse("tcp:localhost:1") == Address("tcp", "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tcp:0.0.0.0:1", "use tcp:127.0.0.1:1 or unix:/path"),
        ("tcp:10.0.0.1:29500", "not a loopback address"),
        ("tcp:[::]:1", "not a loopback address"),
        ("tcp:example.org:1", "not of the form"),
        ("tcp:127.0.0.1:x", "not of the form"),
        ("tcp:127.0.0.1", "not of the form"),
        ("tcp:127.0.0.1:65536", "from 0 to 65535"),
        ("tcp:127.0.0.1:-1", "from 0 to 65535"),
        ("unix:relative", "absolute path"),
        ("unix:", "absolute path"),
        (f"unix:/{'x' * 107}", "108 bytes and the system allows 107"),
        ("udp:127.0.0.1:1", "neither unix:"),
        ("", "neither unix:"),
    ],
)
def test_what_others_could_reach_or_nobody_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)
    assert says in str(caught.value)
