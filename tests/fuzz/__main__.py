# ruff: noqa: T201 - a command prints
"""`python -m tests.fuzz --frames 1000000 --seed 0` attacks a node and prints what became of it.

Most frames go straight into the connections of a node, the share `--on-sockets` over TCP. Exit code
1 if anything went wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from tests.fuzz import campaign, outcome, sockets


def report(title: str, found: outcome.Outcome) -> None:
    """Print one campaign."""
    rate = found.frames / found.seconds
    print(f"{title}: {found.frames:,} frames on {found.connections:,} connections")
    print(f"  {found.seconds:.0f} s, {rate:,.0f} frames/s; {found.delivered:,} messages delivered")
    for what, counts in (("sent by", found.sent), ("ended as", found.counts)):
        for name, count in counts.most_common():
            print(f"  {what:>8} {name:34} {count:10,}")
    if any(found.rss_mib):
        warm, after, peak = found.rss_mib
        print(f"  memory: {warm:.0f} MiB after a tenth, {after:.0f} at the end, {peak:.0f} at most")
    for problem, count in Counter(each[:300] for each in found.problems).most_common(20):
        print(f"  BROKEN ({count}x) {problem}")


def main() -> int:
    """Attack, print, and say whether it held."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--on-sockets", type=float, default=0.02, help="share of the frames")
    args = parser.parse_args()
    on_sockets = int(args.frames * args.on_sockets)
    memory = campaign.run(args.frames - on_sockets, args.seed)
    report("in memory", memory)
    tcp = sockets.run(on_sockets, args.seed)
    report("on sockets", tcp)
    return 1 if memory.problems or tcp.problems else 0


if __name__ == "__main__":
    sys.exit(main())
