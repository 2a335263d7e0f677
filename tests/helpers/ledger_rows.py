"""A finished group in a ledger."""

from typing import Any

from ratchet.storage.ledger import GroupLedger

RESULT: dict[str, Any] = {
    "min_version": 2,
    "max_version": 3,
    "reward_mean": 0.25,
    "reward_std": 0.5,
    "num_tokens": 64,
    "num_rollouts": 8,
}


def finished(ledger: GroupLedger, prompt_id: str = "p") -> int:
    group_id = ledger.issue(prompt_id, 0, 1.0)
    ledger.claim(group_id, 0, "rollout-0", 2.0)
    ledger.finish(group_id, 0, **RESULT, now=3.0)
    return group_id
