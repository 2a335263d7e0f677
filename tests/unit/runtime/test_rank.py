import psutil
import pytest

from ratchet.errors import ConfigError
from ratchet.runtime.placement import RankSpec, RoleSpec
from ratchet.runtime.rank import _host, interface_of
from ratchet.types import RoleInfo


def test_every_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("::1") == "lo"
    for name, addresses in psutil.net_if_addrs().items():
        first = {each.family.name: each.address for each in reversed(addresses)}
        if name != "lo" and "AF_INET" in first:
            assert interface_of(first["AF_INET"]) == name


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'192\.0\.2\.77' is not the address"):
        interface_of("192.0.2.77")


def test_ranks_of_one_node_keep_to_the_loopback_interface() -> None:
    role = RoleInfo("trainer", "trainer-0", "life")
    tcp = RoleSpec(role, "/run", "r", listen="tcp:10.0.0.7:0", registry="tcp:10.0.0.1:1", key="")
    assert _host(tcp, RankSpec(8)) == "127.0.0.1"
    assert _host(tcp, RankSpec(8, 2, 1, "10.0.0.7:29400")) == "10.0.0.7"
