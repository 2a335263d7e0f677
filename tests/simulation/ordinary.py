"""Handmade worlds: an ordinary small run, and exactly the faults that matter.

Consumes faults and what else is out of the ordinary; produces a `Plan`. Waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.helpers.config import small_config
from tests.simulation.lives import Delays, Links
from tests.simulation.plan import Plan

from ratchet.transport.mailbox.limits import Limits

if TYPE_CHECKING:
    from tests.simulation.faults import Fault


def ordinary(
    *faults: Fault,
    delays: Delays | None = None,
    limits: Limits | None = None,
    seed: int = 1,
    **sections: dict[str, Any],
) -> Plan:
    """Make a world of one worker and ten steps.

    Args:
        faults: all that goes wrong.
        delays: what takes how long.
        limits: of the links.
        seed: of delays, and of the order between processes.
        sections: of the configuration, merged over the ordinary one.
    """
    base: dict[str, dict[str, Any]] = {
        "rollout": {"max_tokens": 2, "group_size": 2, "num_workers": 1, "group_timeout_s": 40.0},
        "buffer": {"batch_groups": 2, "max_staleness": 2, "lease_s": 60.0},
        "trainer": {"num_steps": 10, "batch_timeout_s": 2000.0},
    }
    config = small_config(
        **{name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
    )
    links = Links() if limits is None else Links(limits)
    return Plan(seed, config, delays or Delays(), 20, tuple(faults), links)
