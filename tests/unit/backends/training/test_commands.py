import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.helpers.training import copy_prompts, make_groups

from ratchet.backends.training.commands import (
    Close,
    Command,
    Export,
    ForwardBackward,
    OptimizerStep,
    Read,
    SkipStep,
    Start,
    WarmStart,
    decode,
    encode,
    perform,
)
from ratchet.backends.training.fake import FakeBackend

COMMANDS: list[Command] = [
    Start(),
    WarmStart(tuple(copy_prompts(3))),
    ForwardBackward(tuple(make_groups(2, 2))),
    OptimizerStep(),
    SkipStep(),
    Read(("a", "b")),
    Export("/some/where"),
    Close(),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_survives_the_wire(command: Command) -> None:
    assert decode(encode(command)) == command


@pytest.mark.parametrize(
    "foreign",
    [["Reboot"], ["Export"], ["Export", 3], [], {"type": "Start"}, 1],
)
def test_nothing_else_is_a_command(foreign: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode(foreign))


class Recorder(FakeBackend):
    """Notes the calls it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in {
            "start", "warm_start", "forward_backward", "optimizer_step", "skip_step", "read",
            "export", "close",
        }:  # fmt: skip
            self.calls.append(name)
        return super().__getattribute__(name)


def test_each_command_is_the_call_of_its_name(tmp_path: Path) -> None:
    async def main() -> None:
        backend = Recorder()
        await perform(backend, Start())
        assert await perform(backend, WarmStart(tuple(copy_prompts(3)))) == {"loss": 0.0}
        report = await perform(backend, ForwardBackward(tuple(make_groups(2, 2))))
        assert report.finite
        assert (await perform(backend, OptimizerStep())).applied
        await perform(backend, SkipStep())
        (w,) = await perform(backend, Read(("w",)))
        assert float(w[0]) == 1.0
        await perform(backend, Export(str(tmp_path / "model")))
        assert (tmp_path / "model").is_dir()
        await perform(backend, Close())
        assert backend.calls == [
            "start", "warm_start", "forward_backward", "optimizer_step", "skip_step", "read",
            "export", "close",
        ]  # fmt: skip

    asyncio.run(main())
