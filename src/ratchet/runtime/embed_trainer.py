"""`Trainer`: batches out and published weights in, for a training loop of the user's own.

Consumes the user's module, produces versions of the run. `publish` waits for the transfer before
it, for the copy of the weights and for their number; then the loop goes on while they travel.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from ratchet.actors.guest_trainer import GuestTrainer
from ratchet.backends.training.base import TrainingBackend
from ratchet.errors import ConfigError
from ratchet.runtime.batch_filter import open_batch_filter
from ratchet.runtime.embed_guest import Host
from ratchet.runtime.embed_link import BackgroundLoop
from ratchet.runtime.embed_loop import OwnBatch, OwnLoop, Snapshot
from ratchet.runtime.output import RunOutput
from ratchet.transport.weights.registry import open_sender
from ratchet.types import PolicyVersion

if TYPE_CHECKING:
    import torch

_ENDLESS: Final = 2**62


class OwnOutput:
    """Metrics and summary, into the run directory where there is one."""

    def __init__(self, files: RunOutput | None) -> None:
        self._files = files
        self.last: Mapping[str, Any] = {}

    def begin(self, step: int) -> None:
        """Leave what is there: which model a guest goes on with is the guest's to know."""

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Keep one line of metrics, and write it."""
        self.last = dict(metrics)
        if self._files is not None:
            self._files.step(metrics)

    def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Write one line of an evaluation."""
        if self._files is not None:
            self._files.evaluation(evaluation)

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Write how the run ended."""
        if self._files is not None:
            self._files.summary(summary)

    async def model(self, backend: TrainingBackend) -> None:
        """Write nothing: the module is the user's to save."""


async def start_trainer(
    host: Host, model: torch.nn.Module, name: str | None, patience_s: float
) -> tuple[OwnLoop, OwnOutput]:
    """Start the trainer of a guest: it takes the next term and publishes what `model` holds.

    Raises:
        ConfigError: if the engines of the run wait for an adapter.
    """
    if host.config.model.lora is not None:
        msg = (
            "a run with [model.lora] cannot be trained by a loop of your own: its engines take an"
            " adapter, and the loop publishes a whole model; leave the section out"
        )
        raise ConfigError(msg)
    trainer = host.config.trainer.model_copy(update={"num_steps": _ENDLESS})
    warm_start = host.config.warm_start.model_copy(update={"steps": 0})
    config = host.config.model_copy(update={"trainer": trainer, "warm_start": warm_start})
    snapshot = Snapshot(model)
    sender = open_sender(config.effective_weights, host.invitation.host, snapshot)
    member = await host.new_member("trainer", name)
    loop = OwnLoop(snapshot, member, config, patience_s)
    directory = host.invitation.directory
    output = OwnOutput(RunOutput(directory) if directory is not None else None)
    ref = GuestTrainer.start(
        member.system,
        member.role,
        config=config,
        loop=loop,
        sender=sender,
        output=output,
        batch_filter=open_batch_filter(config.buffer),
    )
    member.started(ref, config.runtime.heartbeat_s)
    return loop, output


class _Steps:
    """Counts the batches of one `batches` call."""

    def __init__(self, steps: int | None) -> None:
        self._left = _ENDLESS if steps is None else steps

    def another(self) -> bool:
        self._left -= 1
        return self._left >= 0


class _Trainer:
    def __init__(self, background: BackgroundLoop, loop: OwnLoop, output: OwnOutput) -> None:
        self._background = background
        self._loop = loop
        self._output = output

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The line of the last step: docs/metrics.md; empty before the first."""
        return self._output.last


class Trainer(_Trainer):
    """Your training loop's hold on a run. See `ratchet.join`."""

    def batches(self, steps: int | None = None) -> Iterator[OwnBatch]:
        """Yield batches until `steps` are taken, or the run is over.

        Each asks for `publish` after its optimiser step, or for `skip`, before the next.

        Raises:
            StaleTerm: another trainer has taken over.
            RunFailed: the run has failed, or no batch came within `trainer.batch_timeout_s`.
            RuntimeError: the batch before was neither published nor skipped.
        """
        count = _Steps(steps)
        while count.another():
            batch = self._background.call(self._loop.next_batch())
            if batch is None:
                return
            yield batch

    def publish(self, **metrics: float) -> PolicyVersion:
        """Publish the weights that your step has made; return their version.

        Returns when they are copied and numbered; they travel while you go on.

        Args:
            metrics: what you want to see beside the run's own (`loss`, ...).

        Raises:
            StaleTerm: another trainer has taken over; nothing was published.
            RunFailed: the weights are not finite, and nothing was published; or the run is over.
            RuntimeError: there is no batch in hand.
        """
        return self._background.call(self._loop.step_taken(metrics))

    def skip(self) -> None:
        """Account for a batch that changed no weights: its loss was not finite, say. After
        `trainer.max_bad_steps` of them in a row the run fails.
        """
        self._background.call(self._loop.step_skipped())

    def finish(self) -> None:
        """End the run: the last version goes live, every role is told, and this returns."""
        self._background.call(self._loop.finish())


class AsyncTrainer(_Trainer):
    """`Trainer`, for a loop that awaits."""

    async def batches(self, steps: int | None = None) -> AsyncIterator[OwnBatch]:
        """Yield batches: see `Trainer.batches`."""
        count = _Steps(steps)
        while count.another():
            batch = await self._background.acall(self._loop.next_batch())
            if batch is None:
                return
            yield batch

    async def publish(self, **metrics: float) -> PolicyVersion:
        """Publish the weights: see `Trainer.publish`."""
        return await self._background.acall(self._loop.step_taken(metrics))

    async def skip(self) -> None:
        """Account for a batch that changed no weights."""
        await self._background.acall(self._loop.step_skipped())

    async def finish(self) -> None:
        """End the run."""
        await self._background.acall(self._loop.finish())
