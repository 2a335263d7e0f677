"""How idle an engine's slots are when prompts are submitted by group or by sample.

    python -m benchmarks.submission [groups]

One worker with a fake engine on virtual time makes the same samples both ways. Their lengths are
lognormal with the given sigma; the trainer is faster than the engine. `room` is the buffer's
capacity in groups, compared with the groups that the worker has slots for. Idle is the share of the
slots' time in which no sample runs in them, the last long samples of the whole run included; the
speed-up is the ratio of the times for all groups.
"""

from __future__ import annotations

import sys

from tests.helpers.served_worker import Work, serve

SLOTS = 8
GROUP_SIZE = 8


def main(num_groups: int) -> None:
    """Print a table."""
    print(f"{SLOTS} groups of {GROUP_SIZE} in the slots, {num_groups} groups in all")
    print("sigma  room  idle by group  idle by sample  speed-up  most groups in flight")
    for sigma in (0.5, 1.0, 1.5):
        for factor in (1.25, 1.5, 2.0, 4.0):
            work = Work(num_groups, GROUP_SIZE, SLOTS, round(factor * SLOTS), sigma)
            group, sample = (serve(by, work) for by in ("group", "sample"))
            print(
                f"{sigma:5.1f}  {factor:3.2f}x  {group.idle_share:12.1%}  {sample.idle_share:14.1%}"
                f"  {group.took_s / sample.took_s:7.2f}x  {sample.most_groups:21d}"
            )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
