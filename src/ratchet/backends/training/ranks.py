"""One trainer on several ranks: rank 0 leads, the others follow.

Consumes the calls on rank 0's training backend; produces the same calls, with the same arguments
and in the same order, on every rank's. `Leader` announces a call before it makes it; `follow` is
what the others run. One thread leads: whoever calls, an actor's task or `read` from the thread of a
weight transfer, waits in its queue, and a call is announced, made and agreed upon before the next
is. So the order of the announcements is the order of the calls.

When a call fails:

* On every rank with the same words (an empty batch, a step without gradients): the ranks agree on
  that, rank 0 raises as a backend alone would, and all go on.
* On one rank only (its memory, its disk): the others may already wait for it in a collective, and
  cannot hear of it there. So a rank that failed waits `channel.FAILED_S` for the others to agree;
  then a follower raises, which ends its process with the error in its log and as its outcome. Its
  connections close, and that ends each gloo collective in which another rank waits for it; the
  elastic agent sees the exit within its poll and ends the gang of its node, which is what ends a
  rank that is stuck in NCCL. On other nodes the time limit of the default process group is the last
  word (`channel.COLLECTIVE_S`).
* If rank 0 fails alone, it raises, and its process ends; or it dies: either closes its connections,
  at which every follower raises.

Once the ranks disagree, or one is lost, every later call raises `RunFailed` with that first cause;
only `close` still works, on this rank alone. There is no way back: model and optimiser of the ranks
may differ by half a call. Start all of them again.

A backend of the user's own takes part if its factory returns `lead(backend)`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ratchet.backends.training.base import GradientReport, StepReport, TrainingBackend
from ratchet.backends.training.channel import Channel, GlooChannel, Verdict
from ratchet.backends.training.commands import (
    BeginSave,
    Close,
    Command,
    EndSave,
    Export,
    ForwardBackward,
    OptimizerStep,
    Probe,
    Read,
    Restore,
    SkipStep,
    Start,
    WarmStart,
    perform,
)
from ratchet.backends.training.sharding import current_ranks
from ratchet.errors import RunFailed
from ratchet.transport.weights.base import TensorSpec
from ratchet.types import Prompt, RolloutGroup, WeightProbe

if TYPE_CHECKING:
    import torch


def lead(backend: TrainingBackend) -> TrainingBackend:
    """Return a backend whose calls reach every rank, if this process is rank 0 of several; else
    the backend itself. Its first call waits for the other ranks to call `follow`.
    """
    ranks = current_ranks()
    if ranks.size == 1 or ranks.rank:
        return backend
    return Leader(backend, GlooChannel())


def follow(backend: TrainingBackend, channel: Channel | None = None) -> None:
    """Do as rank 0 announces, until it closes its backend. Blocks; no event loop may run.

    Args:
        backend: of this rank.
        channel: to rank 0; by default a new one.

    Raises:
        RunFailed: if a call failed on some ranks only, or rank 0 is lost.
    """
    if channel is None:
        channel = GlooChannel()
    with asyncio.Runner() as runner:
        try:
            command: Command = Start()
            while not isinstance(command, Close):
                command = channel.receive()
                error = _attempt(runner, backend, command)[1]
                if not isinstance(command, Close):
                    _check_agreed(channel, command, error)
                elif error is not None:
                    raise error
        finally:
            runner.run(backend.close())


def _attempt(
    runner: asyncio.Runner, backend: TrainingBackend, command: Command
) -> tuple[Any, Exception | None]:
    """Return the result of a call, or its error."""
    try:
        return runner.run(perform(backend, command)), None
    except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised
        return None, error


def _check_agreed(channel: Channel, command: Command, error: Exception | None) -> None:
    """Return if the call ended on every rank as it did here.

    Raises:
        RunFailed: if not; the text names the rank that failed, and how.
    """
    mine = Verdict.of(error)
    call = type(command).__name__
    try:
        verdicts = channel.agree(mine)
    except RunFailed as lost:
        if error is None:
            raise
        msg = f"{call} failed on rank {channel.rank} alone: {mine.text} ({lost})"
        raise RunFailed(msg) from error
    if all(verdict == mine for verdict in verdicts):
        return
    failed = [f"rank {rank}: {text}" for rank, (text,) in enumerate(verdicts) if text]
    msg = f"{call} did not end alike on all ranks: {'; '.join(failed)}"
    raise RunFailed(msg) from error


class Leader:
    """A `TrainingBackend` on rank 0 that takes all ranks along."""

    def __init__(self, backend: TrainingBackend, channel: Channel) -> None:
        self._backend = backend
        self._channel = channel
        self._thread: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="leader")
        self._runner: Final = asyncio.Runner()
        """the loop of the calls: a caller that blocks its own loop, in `read`, blocks no call"""
        self._lost: str | None = None
        self._closed = False

    async def start(self) -> None:
        """Load the base model on every rank."""
        await self._all(Start())

    async def warm_start(self, prompts: Sequence[Prompt]) -> Mapping[str, float]:
        """Train on the prompts' references."""
        report: Mapping[str, float] = await self._all(WarmStart(tuple(prompts)))
        return report

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        """Compute the gradients of the configured loss."""
        report: GradientReport = await self._all(ForwardBackward(tuple(groups)))
        return report

    async def optimizer_step(self) -> StepReport:
        """Clip, apply, and drop the gradients."""
        report: StepReport = await self._all(OptimizerStep())
        return report

    async def skip_step(self) -> None:
        """Throw the gradients away."""
        await self._all(SkipStep())

    def specs(self) -> Sequence[TensorSpec]:
        """Describe every parameter: rank 0 knows them all."""
        return self._backend.specs()

    def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Return the full, current tensors, after the calls that wait; blocks."""
        self._check_open()
        tensors: Sequence[torch.Tensor] = self._thread.submit(
            self._lead, Read(tuple(names))
        ).result()
        return tensors

    async def probe(self, seed: int) -> WeightProbe | None:
        """Compute it on every rank, as each holds a part of the weights."""
        probe: WeightProbe | None = await self._all(Probe(seed))
        return probe

    async def begin_save(self, directory: Path) -> None:
        """Write the state from every rank."""
        await self._all(BeginSave(str(directory)))

    async def written(self) -> None:
        """Wait until rank 0 has written, while all ranks train."""
        await self._backend.written()

    async def end_save(self) -> None:
        """Wait until every rank has written."""
        await self.written()
        await self._all(EndSave())

    async def restore(self, directory: Path) -> None:
        """Go on from a saved state on every rank."""
        await self._all(Restore(str(directory)))

    async def export(self, path: Path) -> None:
        """Write the model from rank 0."""
        await self._all(Export(str(path)))

    async def close(self) -> None:
        """End every rank's `follow`, after the calls that wait, and free everything."""
        if not self._closed:
            self._closed = True
            await self._on_thread(Close())
            await asyncio.to_thread(self._thread.shutdown)

    async def _all(self, command: Command) -> Any:
        self._check_open()
        return await self._on_thread(command)

    async def _on_thread(self, command: Command) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._lead, command)

    def _check_open(self) -> None:
        if self._closed:
            msg = "the training backend is not started, or it is closed"
            raise RuntimeError(msg)

    # --- on the leading thread

    def _lead(self, command: Command) -> Any:
        """Announce a call, make it, and agree with the others on how it went."""
        if isinstance(command, Close):
            return self._end()
        if self._lost is not None:
            raise RunFailed(self._lost)
        try:
            self._channel.announce(command)
            result, error = _attempt(self._runner, self._backend, command)
            _check_agreed(self._channel, command, error)
        except RunFailed as lost:
            self._lost = str(lost)
            raise
        if error is not None:
            raise error
        return result

    def _end(self) -> None:
        try:
            if self._lost is None:
                self._channel.announce(Close())
        finally:
            with self._runner:
                self._runner.run(perform(self._backend, Close()))
