"""A run of which each node shows a certificate of one authority, and an authority of strangers."""

from __future__ import annotations

import pytest
from tests.helpers.certificates import Authority
from tests.helpers.nodes import KEY

from ratchet.transport.mailbox.credentials import Credentials
from ratchet.transport.mailbox.wire import SocketWire


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def wire(authority: Authority) -> SocketWire:
    return SocketWire(Credentials(KEY, authority.credentials().tls))
