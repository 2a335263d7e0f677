"""Run directories for the tests of what reads them."""

from pathlib import Path

from ratchet.storage.ledger import GroupLedger
from ratchet.storage.versions import VersionStore


def write_ledgers(root: Path) -> None:
    """Four versions (live, live, burnt, reserved) and six groups (one waits, two trained, three
    dropped), as the registry and the buffer write them.
    """
    versions = VersionStore.open(root / "versions.sqlite")
    term = versions.acquire_term("trainer-0", "a", 1.0)
    for version, step in enumerate((0, 1, 2, 2)):
        versions.reserve(term, step, version - 1 if 0 < version < 3 else None, 2.0)
        if version < 2:
            versions.commit(version, f"{version:064x}", 3.0)
        elif version == 2:
            versions.burn(version, "no engine", 3.0)
    versions.close()

    ledger = GroupLedger.open(root / "ledger.sqlite")
    for n in range(6):
        group = ledger.issue(f"prompt-{n}", 0, 1.0)
        if n == 5:
            break
        ledger.claim(group, 0, "rollout-0", 2.0)
        if n == 4:
            ledger.drop(group, "failed", 3.0)
            continue
        ledger.finish(
            group,
            0,
            min_version=n // 2,
            max_version=1,
            reward_mean=0.25,
            reward_std=0.5,
            num_tokens=64,
            num_rollouts=8,
            now=3.0,
        )
        if n < 2:
            ledger.batch([group], 1, {group: 1}, 4.0)
            ledger.train([group], 1, 0, 5.0)
        else:
            ledger.drop(group, "stale", 4.0)
    ledger.close()
