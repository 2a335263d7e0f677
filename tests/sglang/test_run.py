"""A whole run whose engine dies in the middle: its scheduler is killed, as for want of memory."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from tests.helpers.command import Command, gone, kill
from tests.helpers.config import small_config
from tests.helpers.launched import ratchet
from tests.helpers.sglang_server import ARGS, COMMAND, START_S

from ratchet.storage.ledger import read_groups

if TYPE_CHECKING:
    import psutil

NUM_STEPS = 12
CONFIG = small_config(
    task={"name": "copy", "args": {"digits": 3, "num_prompts": 40, "holdout": 14}},
    rollout={
        "backend": "sglang",
        "group_size": 4,
        "max_tokens": 40,
        "sglang": {"command": list(COMMAND), "args": list(ARGS), "start_timeout_s": START_S},
    },
    trainer={"num_steps": NUM_STEPS, "lr": 1e-3, "batch_timeout_s": START_S},
)


def test_a_run_outlives_the_scheduler_of_its_server(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Command(CONFIG, root) as command:
        command.until("step 3", lambda: len(command.steps()) >= 3, within_s=START_S)
        engine = servers(command)
        (scheduler,) = (each for each in engine if "scheduler" in " ".join(each.cmdline()))
        kill(scheduler.pid, signal.SIGKILL)
        code, output = command.finish(START_S)
    assert code == 0, output
    assert not gone(engine, 10)

    steps = [line["step"] for line in command.steps()]
    assert steps == list(range(1, NUM_STEPS + 1))
    check_lives(command)
    groups = list(read_groups(root / "ledger.sqlite"))
    trained = [group for group in groups if group.state in {"trained", "committed"}]
    assert Counter(group.trained_step for group in trained) == dict.fromkeys(steps, 4)
    code, said = ratchet("audit", str(root))
    assert code == 0, said


def servers(command: Command) -> list[psutil.Process]:
    """The processes of the engine, the keeper among them."""
    (keeper,) = (each for each in command.family() if "sglang.keeper" in " ".join(each.cmdline()))
    return [keeper, *keeper.children(recursive=True)]


def check_lives(command: Command) -> None:
    """The worker said why it ended; the next one began with what was live by then."""
    first, second = (each["timestamp"] for each in command.events("rollout-0", "role_starting"))
    (failed,) = command.events("rollout-0", "actor_failed")
    assert first < failed["timestamp"] < second
    assert failed["reason"].startswith("EngineLost: the SGLang server died of signal")
    loads = command.events("rollout-0", "weights_loaded")
    before = [each["version"] for each in loads if each["timestamp"] < second]
    after = [each["version"] for each in loads if each["timestamp"] > second]
    assert before[0] == 0
    assert after[0] >= max(3, before[-1])  # three steps were taken
