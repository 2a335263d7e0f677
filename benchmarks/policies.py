"""Which groups a buffer lets begin, keeps and trains: our policies beside models of others.

    python -m benchmarks.policies [--full]

One trace (lengths and rewards of each sample) is replayed on virtual time through each policy, with
the rollout workers, and for ours the buffer, as they are; 4 engines of 16 samples each decode at a
fixed speed, a mean sample takes 40 s, a batch is B = 16 groups of 4. "Trainer/engines" is the time
of a step by the time in which the engines, with no slot ever idle, make a batch. Lengths are
lognormal (sigma), half of their variance the prompt's, cut off at 16 means. Columns: shares of time
idle; age: staleness in steps of a trained group's oldest trained token, and of each trained token;
wasted: share of the tokens of ended groups that no step trained, dropped or masked; length: mean
and p90 of a trained sample's trained tokens by the lengths offered; reward: trained less offered.
Virtual time: the numbers do not depend on the machine. 60 steps are counted, after 30.

Policies: "drop, 2 B" is the default (capacity_factor 2.0), at this bound. AReaL's rule does not
enforce its bound, so compare it by the max of its age: it is an unbounded queue with less in
flight. "windowed FIFO" does. See `policies_others.py` for the models.

Submission by sample, sigma 1.0, trainer/engines 1.0:

    bound  policy           steps/h  idle: trainer engines  age: mean max  wasted  length  reward
    1      drop, 2 B           47.3            47%     24%       0.90   1     61%    0.58  +0.070
           mask, 2 B           68.7            24%     25%       1.00   1     64%    0.36  +0.000
           mask, 3 B           77.8            14%     10%       0.99   1     75%    0.26  -0.002
           bounded, 2 B        23.4            74%     75%       1.00   1      0%    1.00  +0.000
           AReaL               47.7            47%     48%       1.00   8      0%    1.00  +0.000
           windowed FIFO       12.7            86%     86%       0.00   0      0%    1.00  +0.000
    2      drop, 2 B           58.2            35%     24%       1.32   2     41%    0.72  +0.038
           drop, (m + 1) B     64.1            29%     10%       1.46   2     49%    0.65  +0.053
           mask, 2 B           69.7            23%     25%       1.63   2     31%    0.68  +0.000
           mask, 3 B           82.9             8%     11%       1.87   2     50%    0.48  +0.000
           bounded, 2 B        29.3            67%     68%       1.16   2      0%    1.00  +0.000
           bounded, 3 B        31.3            65%     66%       2.00   2      0%    1.00  +0.000
           AReaL               73.4            18%     21%       1.98  13      0%    1.00  +0.000
           windowed FIFO       25.6            72%     72%       1.00   2      0%    1.00  +0.000
    4      unbounded queue     84.1             7%      9%       3.07  16      0%    1.00  +0.000
           drop, 2 B           66.8            26%     25%       1.82   4     17%    0.87  +0.011
           drop, (m + 1) B     76.9            15%     10%       2.16   4     25%    0.81  +0.021
           retry, 2 B          62.1            31%     25%       1.77   4     19%    0.91  +0.008
           mask, 2 B           69.7            23%     25%       2.02   4      8%    0.91  +0.000
           mask, 3 B           82.8             8%     11%       2.59   4     15%    0.86  +0.000
           bounded, 2 B        42.8            52%     54%       1.02   4      0%    1.00  +0.000
           bounded, 3 B        46.7            48%     50%       2.00   4      0%    1.00  +0.000
           bounded, 4 B        46.8            48%     50%       3.00   4      0%    1.00  +0.000
           bounded, (m+1) B    46.8            48%     50%       4.00   4      0%    1.00  +0.000
           AReaL               84.0             7%     10%       3.02  16      0%    1.00  +0.000
           windowed FIFO       46.9            48%     50%       3.00   4      0%    1.00  +0.000
    8      drop, 2 B           69.2            23%     25%       2.09   8      3%    0.97  +0.003
           mask, 2 B           69.7            23%     25%       2.12   8      1%    0.99  +0.000
           mask, 3 B           82.8             8%     11%       2.81   8      2%    0.97  +0.000
           bounded, 2 B        47.7            47%     48%       1.00   8      0%    1.00  +0.000
           bounded, 3 B        66.8            26%     28%       1.98   8      0%    1.00  +0.000
           bounded, 4 B        69.7            23%     24%       2.86   8      0%    1.00  +0.000
           bounded, (m+1) B    69.4            23%     25%       7.83   8      0%    1.00  +0.000
           AReaL               84.1             7%     10%       3.06  16      0%    1.00  +0.000
           windowed FIFO       68.2            24%     26%       6.78   8      0%    1.00  +0.000

Bound 4, one thing changed: steps/h, mean age, wasted. "Faster", "slower": the trainer, that is
trainer/engines 0.5, 2.0

    policy           by group       faster         slower         sigma 0.5      sigma 1.5
    drop, 2 B        49.4 1.48  8%  67.8 1.66 16%  44.9 2.51 15%  78.3 2.06  1%  56.8 1.55 35%
    drop, (m + 1) B  49.4 1.48  8%  79.4 1.72 21%  45.0 3.71 55%  81.6 2.19  1%  76.4 2.04 50%
    retry, 2 B       47.8 1.45 10%  64.7 1.64 16%  44.8 2.44 18%  78.9 2.07  0%  51.2 1.53 38%
    mask, 2 B        50.3 1.54  3%  70.4 1.80  7%  45.0 2.65  6%  79.0 2.08  0%  62.4 1.92 21%
    mask, 3 B        50.3 1.54  4%  83.7 1.94 10%  45.0 3.52 13%  82.4 2.24  0%  83.7 2.57 32%
    bounded, 2 B     41.1 1.01  0%  46.9 1.01  0%  33.5 1.01  0%  52.6 1.02  0%  31.6 1.01  0%
    bounded, 3 B     44.2 1.72  0%  50.1 1.95  0%  38.4 1.99  0%  79.7 1.99  0%  32.5 2.00  0%
    bounded, 4 B     44.8 2.36  0%  52.5 2.71  0%  38.4 3.00  0%  81.8 2.55  0%  32.5 3.00  0%
    bounded, (m+1) B 44.7 3.01  0%  52.7 3.68  0%  38.4 4.00  0%  82.6 2.60  0%  32.5 4.00  0%
    AReaL            50.3 1.57  0%  83.7 2.11  0%  45.0 3.99  0%  82.4 2.25  0%  85.5 3.68  0%
    windowed FIFO    43.1 2.62  0%  50.1 2.84  0%  38.4 3.00  0%  81.2 2.68  0%  32.5 3.00  0%

Where ours is worse, and why. With room for 4 B (at a bound of 2 for 3 B) `bounded` takes as many
steps as a windowed FIFO at the same bound, or more; at 4 and 8 on data as old or younger, at 1 and
2 a step older. Of the 72 combinations of --full it takes fewer steps in one, at 4 above: the two
differ by 10 s in 60 steps of this trace (46.8 against 46.9 an hour). Both wait for the same
stragglers, and on four other traces (seeds 1 to 4) it is 43.3, 41.4, 47.1 and 42.8 against 43.3,
41.3, 47.1 and 42.6. Room for 3 B costs up to 7% of the steps and saves a step of age. Room for 2 B,
the default, is too little for `bounded` where lengths are short, steps long, or the bound is 8: a
step that trains keeps the places of its batch until its version is there, so one batch only is
generated meanwhile. All that keep a hard bound without a loss have far fewer steps than `mask`:
they wait for stragglers, and nothing else would do (`ratchet.staleness`). AReaL's rule has no
bound: at 4 it trains on data 16 steps old.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import product
from typing import TYPE_CHECKING, Final

from benchmarks.policies_others import Areal, WindowedFifo
from benchmarks.policies_replay import BATCH_GROUPS, WARM_UP, Policy, Setting, replay
from benchmarks.policies_trace import Trace

if TYPE_CHECKING:
    from benchmarks.policies_outcome import Outcome

POLICIES: Final = (
    Policy("unbounded queue", 1000.0, is_bounded=False),
    Policy("drop, 2 B", 2.0),
    Policy("drop, (m + 1) B"),
    Policy("retry, 2 B", 2.0, {"unused": "retry"}),
    Policy("mask, 2 B", 2.0, {"unused": "mask"}),
    Policy("mask, 3 B", 3.0, {"unused": "mask"}),
    Policy("bounded, 2 B", 2.0, {"admission": "bounded"}),
    Policy("bounded, 3 B", 3.0, {"admission": "bounded"}),
    Policy("bounded, 4 B", 4.0, {"admission": "bounded"}),
    Policy("bounded, (m+1) B", buffer={"admission": "bounded"}),
    Policy("AReaL", 2.0, other=Areal),
    Policy("windowed FIFO", 2.0, other=WindowedFifo),
)
STEPS: Final = 90
HEAD: Final = (
    "policy           steps/h  idle: trainer engines  age: mean p99 max  token age: mean p99 max"
    "  wasted  length: mean  p90  reward"
)


def line(name: str, outcome: Outcome) -> str:
    group, token = outcome.group_staleness, outcome.token_staleness
    mean, p90 = outcome.length_bias
    return (
        f"{name:16} {outcome.steps_per_hour:7.1f}  {outcome.trainer_idle:13.0%} "
        f"{outcome.engine_idle:7.0%}  {group[0]:9.2f} {group[1]:3d} {group[2]:3d}  "
        f"{token[0]:15.2f} {token[1]:3d} {token[2]:3d}  {outcome.wasted:6.0%}  "
        f"{mean:12.2f} {p90:4.2f} {outcome.reward_bias:+7.3f}"
    )


def settings(*, full: bool) -> Iterable[tuple[float, Setting]]:
    """Return (sigma, setting): one thing changed at a time, or the whole grid."""
    bounds, submissions = (1, 2, 4, 8), ("sample", "group")
    sigmas, ratios = (1.0, 0.5, 1.5), (1.0, 0.5, 2.0)
    for sigma, ratio, submission, bound in product(sigmas, ratios, submissions, bounds):
        changed = (sigma != 1.0) + (ratio != 1.0) + (submission != "sample") + (bound != 4)
        if full or changed <= 1:
            yield sigma, Setting(bound, submission, ratio, STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--full", action="store_true", help="every combination: about 20 minutes of CPU"
    )
    traces: dict[float, Trace] = {}
    print(f"{STEPS - WARM_UP} steps of {BATCH_GROUPS} groups after {WARM_UP}")
    for sigma, setting in settings(full=parser.parse_args().full):
        trace = traces.setdefault(sigma, Trace(sigma, 6 * STEPS * BATCH_GROUPS))
        print(
            f"\nbound {setting.bound}, sigma {sigma}, trainer/engines {setting.ratio},"
            f" submission by {setting.submission}\n{HEAD}"
        )
        for policy in POLICIES:
            print(line(policy.name, replay(policy, trace, setting)), flush=True)


if __name__ == "__main__":
    main()
