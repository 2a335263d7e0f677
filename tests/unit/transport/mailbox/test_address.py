from __future__ import annotations

import pytest

from ratchet.errors import ConfigError
from ratchet.transport.mailbox.address import Address


@pytest.mark.parametrize(
    "text",
    [
        "unix:/run/x/buffer.sock",
        "tcp:127.0.0.1:0",
        "tcp:127.8.8.8:65535",
        "tcp:[::1]:80",
        "tcp:10.0.0.1:29500",
        "tcp:[fe80::1%eth0]:1",
        "tcp:node-7:1",
        "tcp:buffer-0.buffer.ratchet.svc.cluster.local:1",
    ],
)
def test_an_address_survives_its_text(text: str) -> None:
    assert str(Address.parse(text)) == text


def test_localhost_is_a_loopback_address() -> None:
    assert Address.parse("tcp:localhost:1") == Address("tcp", "127.0.0.1", 1)


@pytest.mark.parametrize(
    ("text", "is_local", "is_name"),
    [
        ("unix:/x", True, False),
        ("tcp:127.0.0.1:0", True, False),
        ("tcp:127.8.8.8:0", True, False),
        ("tcp:[::1]:0", True, False),
        ("tcp:[::ffff:127.0.0.1]:0", True, False),
        ("tcp:10.0.0.1:0", False, False),
        ("tcp:[::ffff:10.0.0.1]:0", False, False),
        ("tcp:[2001:db8::1]:0", False, False),
        ("tcp:node-7:1", False, True),
    ],
)
def test_who_can_reach_it(text: str, is_local: bool, is_name: bool) -> None:
    address = Address.parse(text)
    assert (address.is_local, address.is_name) == (is_local, is_name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *(
            (text, "every interface; name the one that others reach")
            for text in (
                "tcp:0.0.0.0:1",
                "tcp:[::]:1",
                "tcp:[::0]:1",
                "tcp:[::%1]:1",
                "tcp:[::ffff:0.0.0.0]:1",
            )
        ),
        # what a resolver takes for an IP address, the wildcard among them
        *(
            (f"tcp:{host}:1", "neither an IP address nor the name of a machine")
            for host in ("0", "0x0", "0.0", "127.1", "node.0x0", "node.0")
        ),
        ("tcp:a_b:1", "nor the name of a machine"),
        ("tcp:-a:1", "nor the name of a machine"),
        ("tcp:a..b:1", "nor the name of a machine"),
        (f"tcp:{'a' * 64}:1", "nor the name of a machine"),
        (f"tcp:{'.'.join(['a' * 50] * 5)}:1", "nor the name of a machine"),
        ("tcp:a b:1", "nor the name of a machine"),
        ("tcp::1", "not of the form"),
        ("tcp:127.0.0.1:x", "not of the form"),
        ("tcp:127.0.0.1:١", "not of the form"),
        ("tcp:127.0.0.1", "not of the form"),
        ("tcp:127.0.0.1:65536", "from 0 to 65535"),
        ("tcp:127.0.0.1:-1", "not of the form"),
        ("unix:relative", "absolute path"),
        ("unix:", "absolute path"),
        (f"unix:/{'x' * 107}", "108 bytes and the system allows 107"),
        ("udp:127.0.0.1:1", "neither unix:"),
        ("", "neither unix:"),
    ],
)
def test_every_interface_and_what_is_no_address_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)
    assert says in str(caught.value)
