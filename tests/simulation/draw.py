"""From a seed to a plan: a configuration, delays, and the faults of one world.

Extremes are drawn as often as the ordinary: no slack in the buffer, no staleness, one prompt, more
workers than prompts, leases that are as short as the groups are long.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tests.helpers.config import small_config
from tests.simulation import faults as f
from tests.simulation import weight_faults
from tests.simulation.admission_draws import draw_admission
from tests.simulation.batch_marks import draw_batch_filter
from tests.simulation.dense_draws import draw_dense
from tests.simulation.lives import Delays, Links
from tests.simulation.plan import Plan
from tests.simulation.rollout_draws import draw_submission
from tests.simulation.trainer_draws import draw_payloads, draw_trainers
from tests.simulation.trainer_faults import TakeOver
from tests.simulation.verdict_draws import MOST_SABOTAGE_S, draw_verdicts
from tests.simulation.verdict_draws import draw_faults as draw_aborts

from ratchet.actors.role import BUFFER, REGISTRY, TRAINER, evaluator_name, rollout_name
from ratchet.config import Config
from ratchet.transport.mailbox.limits import Limits

_FIRST = 1000
"""The first seed of worlds that may differ from those to which mutants are pinned."""


def draw(seed: int) -> Plan:
    """Draw a world."""
    rng = random.Random(f"plan/{seed}")
    # a laptop's seconds, or a cluster's minutes: everything that takes time, but for messages
    scale = rng.choice([1.0, 1.0, 10.0, 30.0, 60.0])
    delays = Delays(
        step_s=rng.choice([0.1, 2.0, 10.0, 40.0]) * scale,
        token_s=rng.choice([0.05, 0.5, 3.0]) * scale,
        move_s=rng.choice([0.01, 0.5, 5.0]),
        load_s=rng.choice([0.001, 0.1, 2.0]),
        message_s=rng.choice([0.0005, 0.002, 0.05]),
        tail_share=rng.choice([0.0, 0.0, 0.02, 0.2]),
        tail_s=rng.choice([0.1, 2.0]),
    )
    links = replace(_links(rng, scale, seed), launchers=random.Random(seed).choice(["one", "each"]))
    config = _config(rng, delays, links, seed)
    # a world without faults would take about this long
    generation_s = delays.token_s * config.rollout.max_tokens * 3
    horizon = config.trainer.num_steps * (delays.step_s + delays.move_s + generation_s) + 5
    count = rng.choice([0, 1, 2, 3, 6, 12, 60, 200, 200, 200])
    names = [rollout_name(rank) for rank in range(config.rollout.num_workers)]
    drawn = [_fault(rng, names, horizon, links.limits.dead_s) for _ in range(count)]
    if rng.random() < 0.1:
        drawn.append(_last(rng, horizon, links.limits.dead_s))
    drawn += _rare(seed, horizon, links.limits.dead_s)
    drawn += draw_aborts(seed, horizon)
    drawn += _revived(seed, horizon, links.limits.dead_s)
    drawn += _on_evaluators(seed, config.num_evaluators, horizon)
    weights = config.weights
    trainers = draw_trainers(seed, horizon, delays.step_s, links.limits.dead_s)
    for name, fields in trainers.sections.items():
        section = getattr(config, name).model_copy(update=fields)
        config = config.model_copy(update={name: section})
    drawn += trainers.faults
    drawn += draw_dense(seed, names, horizon, count)
    drawn += weight_faults.draw_faults(seed, names, horizon, weights.timeout_s, weights.verify)
    return Plan(
        seed=seed,
        config=config,
        delays=delays,
        links=links,
        num_prompts=rng.choice([1, 2, 7, 50]),
        faults=tuple(sorted(drawn, key=lambda fault: fault.at)),
        save_s=trainers.save_s,
        payload_s=draw_payloads(seed),
        has_standby=trainers.has_standby,
    )


def _links(rng: random.Random, scale: float, seed: int) -> Links:
    heartbeat_s = rng.choice([1.0, 2.0]) * scale
    # else a slow world is busy with dialling who is dead
    dial_most_s = min(4.0, heartbeat_s / 8) if seed >= _FIRST else 0.0
    limits = Limits(
        heartbeat_s=heartbeat_s,
        suspect_s=5 * heartbeat_s,
        dead_s=15 * heartbeat_s,
        delivery_s=30 * heartbeat_s,
        dial_most_s=max(0.5, dial_most_s),
    )
    return Links(limits, drift=rng.choice([0.0, 1e-4, 0.02]), moves=rng.random() < 0.5)


def _config(rng: random.Random, delays: Delays, links: Links, seed: int) -> Config:
    group_size = rng.choice([1, 2, 2, 2, 3])
    max_tokens = rng.choice([1, 2, 4])
    group_s = delays.token_s * max_tokens
    group_timeout_s = group_s * rng.choice([3, 8.5, 30]) + 1
    lease_s = group_timeout_s * rng.choice([1.0, 1.0, 1.5, 4.0])
    buffer: dict[str, Any] = {
        "batch_groups": rng.choice([1, 2, 3, 4]),
        "capacity_factor": rng.choice([1.0, 1.0, 1.5, 2.0, 4.0]),
        "max_staleness": rng.choice([0, 0, 1, 2, 4]),
        "unused": rng.choice(["drop", "retry"]),
        "max_retries": rng.choice([0, 1, 3]),
        "max_reissues": rng.choice([0, 1, 3]),
        "lease_s": lease_s,
    }
    no_spread = rng.random() < 0.2
    hopeless = no_spread and group_size == 1
    buffer |= draw_verdicts(seed, max_tokens, hopeless=hopeless)
    if no_spread and not hopeless:
        buffer["filters"] = ["zero_spread", *buffer["filters"]]
    buffer |= draw_batch_filter(seed)
    buffer |= draw_admission(seed, buffer["batch_groups"], group_size)
    rollout: dict[str, Any] = {
        "num_workers": rng.choice([1, 1, 2, 2, 3, 5]),
        "group_size": group_size,
        "max_tokens": max_tokens,
        "group_timeout_s": group_timeout_s,
    }
    if rng.random() < 0.3:
        rollout["max_concurrent_groups"] = rng.choice([1, 2, 8])
    config = small_config(
        rollout=rollout,
        buffer=buffer,
        algorithm={"advantage": "mean" if group_size == 1 else "std"},
        trainer={
            "num_steps": rng.choice([2, 5, 8, 12]),
            "synchronous": rng.random() < 0.2,
            # far longer than faults and leases together: who runs into it hangs
            "batch_timeout_s": 50.0 if hopeless else 4e4,
        },
        # by the seed, not by a draw: the worlds of the other seeds stay what they were
        weights={"timeout_s": rng.choice([20.0, 60.0]), "snapshot": seed % 7 == 6}
        | weight_faults.draw_config(seed),
        eval=_evaluation(rng.choice([0, 0, 3, 8]), 0.0 if hopeless else group_timeout_s, seed),
        runtime={"ask_timeout_s": links.limits.delivery_s} | _supervision(seed),
    )
    return draw_submission(config.model_copy(update={"seed": seed}), seed)


def _evaluation(num_prompts: int, group_timeout_s: float, seed: int) -> dict[str, Any]:
    """Evaluation beside training; drawn apart, so that the rest of a world stays as it was."""
    rng = random.Random(f"evaluation/{seed}")
    if not num_prompts or not group_timeout_s:
        return {"num_prompts": num_prompts}
    return {
        "num_prompts": num_prompts,
        "every_steps": rng.choice([0, 0, 1, 2, 3]),
        "samples": rng.choice([1, 2]),
        "engines": rng.choice(["shared", "shared", "own"]),
        "num_workers": rng.choice([1, 2]),
        # long ones outlast many steps, short ones end in the middle of a prompt
        "timeout_s": min(group_timeout_s * rng.choice([0.3, 1.0, 3.0]), 15_000.0),
    }


def _on_evaluators(seed: int, num: int, horizon: float) -> list[f.Fault]:
    """What strikes those that only evaluate; it may cost evaluations, and nothing else."""
    rng = random.Random(f"evaluators/{seed}")
    faults: list[f.Fault] = []
    for name in [evaluator_name(rank) for rank in range(num)] * rng.choice([0, 1, 2]):
        at = _moment(rng, horizon)
        makers: list[Callable[[], f.Fault]] = [
            partial(f.Kill, at, (name,), rng.choice([0.0, 1.0, 100.0]), rng.choice([1, 2])),
            partial(f.LoseTransfer, at, (name,)),
            partial(f.SlowTransfer, at, name, rng.choice([1.0, 15.0, 100.0])),
            partial(f.CorruptTransfer, at, name),
        ]
        faults.append(rng.choice(makers)())
    return faults


def _supervision(seed: int) -> dict[str, Any]:
    """How workers are started again; drawn apart, so that the rest of a world stays as it was."""
    rng = random.Random(f"supervision/{seed}")
    return {
        "restart_strategy": rng.choice(["one_for_one"] * 3 + ["one_for_all", "rest_for_one"]),
        "max_restarts": rng.choice([1, 3, 1000, 1000, 1000]),
        "restart_window_s": rng.choice([60.0, 600.0]),
        "backoff_first_s": rng.choice([0.0, 0.5, 5.0]),
        "backoff_most_s": rng.choice([5.0, 60.0]),
    }


def _fault(rng: random.Random, names: list[str], horizon: float, dead_s: float) -> f.Fault:
    at = _moment(rng, horizon)
    name = rng.choice(names)
    some = tuple(n for n in names if rng.random() < 0.5) or (name,)
    which = rng.choice([(name,), some, tuple(names)])
    role = rng.choice([name, name, REGISTRY, BUFFER, TRAINER])
    for_s = rng.choice([1.0, horizon / 4, horizon])
    short_s = dead_s * rng.choice([0.02, 0.2, 0.45])
    long_s = dead_s * rng.choice([0.7, 1.5, 8.0])
    stop_s = rng.choice([short_s, long_s]) if role == name else short_s
    makers: list[Callable[[], f.Fault]] = [
        lambda: f.Kill(
            at, which, rng.choice([0.0, 0.001, 1.0, 30.0, 100.0]), rng.choice([1, 1, 2])
        ),
        lambda: f.Kill(
            at, which, rng.choice([0.0, 0.01, 5.0]), rng.choice([1, 2, 3]), rng.randrange(1, 200)
        ),
        lambda: f.Silence(at, role, stop_s, rng.choice(["in", "out", "both"])),
        lambda: f.Freeze(at, role, stop_s),
        lambda: f.Cut(at, role),
        lambda: f.SlowReader(at, role, rng.choice([1e4, 1e5]), for_s),
        lambda: f.WallClock(at, role, rng.choice([-1e5, -1.0, 3600.0])),
        lambda: f.DoubleStart(at, name),
        lambda: f.LoseTransfer(at, which),
        lambda: f.SlowTransfer(at, name, rng.choice([1.0, 15.0, 100.0])),
        lambda: f.CorruptTransfer(at, name),
        lambda: f.Sabotage(
            at,
            rng.choice(["reward", "generation", "hang"]),
            rng.choice([0.2, 0.7, 1.0]),
            min(for_s, MOST_SABOTAGE_S),
        ),
        lambda: f.NonFinite(at, rng.choice(["gradients", "step"]), rng.choice([1, 1, 1, 2, 2, 4])),
        lambda: TakeOver(at, rng.choice(["dead", "unreachable", "beside"])),
    ]
    return rng.choice(makers)()


def _last(rng: random.Random, horizon: float, dead_s: float) -> f.Fault:
    """What ends a run."""
    at = _moment(rng, horizon)
    writer = rng.choice([REGISTRY, BUFFER])
    makers: list[Callable[[], f.Fault]] = [
        lambda: f.Stop(at),
        lambda: f.Crash(at, writer, rng.random() < 0.5),
        lambda: f.Crash(at, writer, rng.random() < 0.5),
        lambda: f.BadDisk(
            at, writer, rng.choice(["database or disk is full", "disk I/O error"]), 10.0
        ),
        lambda: f.Freeze(at, rng.choice([REGISTRY, BUFFER, TRAINER]), dead_s * 8),
        lambda: f.Silence(at, rng.choice([REGISTRY, BUFFER, TRAINER]), dead_s * 8, "both"),
    ]
    return rng.choice(makers)()


def _rare(seed: int, horizon: float, dead_s: float) -> list[f.Fault]:
    """What needs its moment; drawn apart, so that the rest of a world stays as it was."""
    rng = random.Random(f"rare/{seed}")
    at = round(rng.uniform(0.1, 0.7) * horizon, 3)
    kind = rng.random()
    if kind < 0.2:  # late, when steps lie behind it; and both trainers want a batch
        take_over = TakeOver(at, rng.choice(["dead", "unreachable", "beside"]))
        return [take_over, f.RepeatRequests(at + rng.uniform(0, horizon / 4), dead_s / 4, 5)]
    if kind < 0.3:
        return [f.RepeatRequests(at + i, dead_s * 0.4, 9) for i in (0.0, dead_s, dead_s * 2)]
    if kind < 0.4:
        return [f.Crash(at, rng.choice([REGISTRY, BUFFER]), rng.random() < 0.5)]
    return []


def _revived(seed: int, horizon: float, dead_s: float) -> list[f.Fault]:
    """Registry and buffer die and are started again; drawn apart, as above."""
    rng = random.Random(f"revived/{seed}")
    faults: list[f.Fault] = []
    for _ in range(rng.choice([0, 0, 0, 0, 1, 1, 2, 4])):
        name = rng.choice([REGISTRY, BUFFER])
        power = name == REGISTRY and rng.random() < 0.5
        down_s = rng.choice([0.0, 0.1, 5.0, dead_s * 0.7])
        faults.append(f.Revive(_moment(rng, horizon), name, down_s, power, rng.randrange(1, 60)))
    return faults


def _moment(rng: random.Random, horizon: float) -> float:
    drawn = [0.0, rng.uniform(0, 1.0), rng.uniform(0, horizon), rng.uniform(0, horizon)]
    return round(rng.choice(drawn), 3)
