"""The calls of a training backend as data: what rank 0 announces to the other ranks.

Consumes a command, produces its bytes; or the call on a backend. Waits for nothing of its own. A
command is msgpack of a closed union: a peer can name nothing that is not on this page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeAlias, assert_never

import msgspec

from ratchet.backends.training.base import TrainingBackend
from ratchet.types import Prompt, RolloutGroup


class _Command(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A call that every rank makes."""


class Start(_Command, frozen=True):
    """`TrainingBackend.start`."""


class WarmStart(_Command, frozen=True):
    """`TrainingBackend.warm_start`."""

    prompts: tuple[Prompt, ...]


class ForwardBackward(_Command, frozen=True):
    """`TrainingBackend.forward_backward`."""

    groups: tuple[RolloutGroup, ...]


class OptimizerStep(_Command, frozen=True):
    """`TrainingBackend.optimizer_step`."""


class SkipStep(_Command, frozen=True):
    """`TrainingBackend.skip_step`."""


class Read(_Command, frozen=True):
    """`WeightSource.read`."""

    names: tuple[str, ...]


class Probe(_Command, frozen=True):
    """`TrainingBackend.probe`."""

    seed: int


class BeginSave(_Command, frozen=True):
    """`TrainingBackend.begin_save`."""

    directory: str


class EndSave(_Command, frozen=True):
    """`TrainingBackend.end_save`."""


class Restore(_Command, frozen=True):
    """`TrainingBackend.restore`."""

    directory: str


class Export(_Command, frozen=True):
    """`TrainingBackend.export`; only rank 0 writes."""

    path: str


class Close(_Command, frozen=True):
    """`TrainingBackend.close`, and the end of the announcements."""


Command: TypeAlias = (
    Start
    | WarmStart
    | ForwardBackward
    | OptimizerStep
    | SkipStep
    | Read
    | Probe
    | BeginSave
    | EndSave
    | Restore
    | Export
    | Close
)

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[Command]] = msgspec.msgpack.Decoder(Command)


def encode(command: Command) -> bytes:
    """Return the bytes of a command."""
    return _encoder.encode(command)


def decode(data: bytes | memoryview) -> Command:
    """Return the command of these bytes.

    Raises:
        msgspec.ValidationError: if they are not a command.
    """
    return _decoder.decode(data)


async def perform(backend: TrainingBackend, command: Command) -> Any:
    """Make the call on this rank's backend; return and raise what the call does."""
    match command:
        case Start():
            return await backend.start()
        case WarmStart():
            return await backend.warm_start(command.prompts)
        case ForwardBackward():
            return await backend.forward_backward(command.groups)
        case OptimizerStep():
            return await backend.optimizer_step()
        case SkipStep():
            return await backend.skip_step()
        case Read():
            return backend.read(command.names)
        case Probe():
            return await backend.probe(command.seed)
        case BeginSave():
            return await backend.begin_save(Path(command.directory))
        case EndSave():
            return await backend.end_save()
        case Restore():
            return await backend.restore(Path(command.directory))
        case Export():
            return await backend.export(Path(command.path))
        case Close():
            return await backend.close()
        case _:
            assert_never(command)
