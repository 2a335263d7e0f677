from __future__ import annotations

from tests.helpers.actors import make_system
from tests.helpers.config import small_config
from tests.simulation.loop import run_virtual

from ratchet.runtime.process_node import limits_of, process_node
from ratchet.transport.mailbox.limits import Limits
from ratchet.transport.mailbox.wire import SocketWire


def test_the_times_of_a_runs_links_are_those_of_its_configuration() -> None:
    runtime = {"heartbeat_s": 0.5, "suspect_s": 2.0, "dead_s": 7.0, "ask_timeout_s": 11.0}
    limits = limits_of(small_config(runtime=runtime))
    assert limits == Limits(heartbeat_s=0.5, suspect_s=2.0, dead_s=7.0, delivery_s=11.0)


def test_a_node_is_the_way_out_of_its_system() -> None:
    async def main() -> None:
        system = make_system()
        node = process_node(
            system, "rollout-0", "a", address=None, key=bytes(16), run_id="r", wire=SocketWire()
        )
        assert system.remote is node
        assert node.name == "rollout-0"

    run_virtual(main())
