import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ratchet.algorithms.advantages import mean_advantages, std_advantages
from ratchet.algorithms.losses import GrpoLoss
from ratchet.algorithms.registry import ADVANTAGES, LOSSES, make_advantage, make_loss
from ratchet.config import AlgorithmConfig
from ratchet.errors import ConfigError
from ratchet.imports import import_object


def test_every_name_of_the_tables_loads() -> None:
    for reference in (*ADVANTAGES.values(), *LOSSES.values()):
        assert callable(import_object(reference))


def test_chosen_by_the_configuration() -> None:
    assert make_advantage(AlgorithmConfig()) is std_advantages
    assert make_advantage(AlgorithmConfig(advantage="mean")) is mean_advantages
    assert isinstance(make_loss(AlgorithmConfig()), GrpoLoss)


def test_a_loss_of_ones_own_gets_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def make(config):\n    return config.clip_low\n")
    assert make_loss(AlgorithmConfig(name=f"{path}:make", clip_low=0.3)) == 0.3


def test_an_advantage_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def double(rewards):\n    return 2 * rewards\n")
    # model_construct: the field of the configuration still knows the built-in names only
    config = AlgorithmConfig.model_construct(advantage=f"{path}:double")
    assert make_advantage(config)(np.array([1.0])).tolist() == [2.0]


def test_an_unknown_loss_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"algorithm\.name = 'gppo' is not known; use one of grpo"
    ):
        make_loss(AlgorithmConfig(name="gppo"))


def test_the_tables_load_no_torch() -> None:
    code = (
        "import sys, ratchet.algorithms.registry as r, ratchet.config as c\n"
        "r.make_advantage(c.AlgorithmConfig())\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
