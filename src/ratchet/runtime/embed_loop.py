"""The user's training loop, as its trainer sees it: a backend whose steps are taken elsewhere.

Consumes the user's module and calls; produces batches for the user, and weights for transfers.
Between the two stands a `Snapshot`: `publish` copies the weights, and transfers read the copy. So
nothing that the loop does to its module, at any time, can reach a transfer that is still under way,
and an engine that joins late is given the version that is live, not what the module has become
since. The price is one more copy of the weights in the memory that they lie in, and the time to
make it.

Waits for the user between a batch and its step, and between a step and the next batch, each for
`loop_timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ratchet.algorithms.packing import MicroBatch, Row, pad, plan_micro_batches, rollout_rows
from ratchet.algorithms.registry import make_advantage
from ratchet.backends.named_weights import named_weights, weight_specs
from ratchet.backends.training.base import GradientReport, StepReport
from ratchet.config import Config
from ratchet.errors import RunFailed
from ratchet.messages import BatchReady
from ratchet.runtime.embed_guest import Member
from ratchet.staleness import Position
from ratchet.stats import BufferStats
from ratchet.transport.weights.base import TensorSpec
from ratchet.types import PolicyVersion, Prompt, RolloutGroup, WeightProbe

T = TypeVar("T")


@dataclass(frozen=True)
class OwnBatch:
    """What one step trains."""

    step: int
    """of the step that this batch takes, from 1"""
    version: PolicyVersion
    """of the weights that take it"""
    groups: tuple[RolloutGroup, ...]
    """whole groups, none of them staler than `buffer.max_staleness` for these weights"""
    stats: BufferStats
    config: Config

    @property
    def rewards(self) -> list[float]:
        """One per rollout, group by group."""
        return [reward for group in self.groups for reward in group.rewards]

    @property
    def rows(self) -> list[Row]:
        """One per rollout, with its advantage within its group (`algorithm.advantage`)."""
        return rollout_rows(self.groups, make_advantage(self.config.algorithm))

    def tensors(self, device: torch.device | str = "cpu") -> MicroBatch:
        """Return all rows as one padded batch."""
        return pad(self.rows).to(torch.device(device))

    def micro_batches(
        self, max_tokens: int | None = None, device: torch.device | str = "cpu"
    ) -> Iterator[MicroBatch]:
        """Yield the rows in padded batches of at most `max_tokens` (`trainer.micro_batch_tokens`)
        tokens, rows of like length together.
        """
        limit = max_tokens or self.config.trainer.micro_batch_tokens
        for shares in plan_micro_batches(self.rows, limit):
            yield pad(shares[0]).to(torch.device(device))


class Snapshot:
    """A copy of a module's weights: a `WeightSource` that the module's owner cannot disturb."""

    def __init__(self, module: torch.nn.Module) -> None:
        weights = named_weights(module)
        self._specs = weight_specs(weights)
        self._weights = {
            spec.name: weights[spec.name].detach() for spec in self._specs if spec.alias_of is None
        }
        self._copies: dict[str, torch.Tensor] = {}

    def specs(self) -> Sequence[TensorSpec]:
        """Describe every parameter and persistent buffer."""
        return self._specs

    def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Return the copies."""
        return [self._copies[name] for name in names]

    def take(self) -> str | None:
        """Copy the weights as they are now; or leave the copies, and name what is not finite."""
        if any(weight.is_cuda for weight in self._weights.values()):
            torch.cuda.synchronize()  # the step may be queued on a stream of its owner
        for name, weight in self._weights.items():
            if weight.is_floating_point() and not bool(torch.isfinite(weight).all()):
                return name
        for name, weight in self._weights.items():
            if name in self._copies:
                self._copies[name].copy_(weight)
            else:
                self._copies[name] = weight.clone()
        return None


class OwnLoop:
    """The user's loop, as a `UserLoop` of its trainer. On the background loop only."""

    def __init__(
        self, snapshot: Snapshot, member: Member, config: Config, patience_s: float
    ) -> None:
        self._snapshot = snapshot
        self._member = member
        self._config = config
        self._patience_s = patience_s
        self._wanted = asyncio.Event()
        self._over = False
        self._due: tuple[BatchReady, Position] | None = None
        self._batch: asyncio.Future[OwnBatch] = _future()
        self._verdict: asyncio.Future[bool] | None = None
        """while a batch is handed over: whether its step was taken"""
        self._delivered = False
        self._outcome: asyncio.Future[PolicyVersion] | None = None
        self._metrics: Mapping[str, float] = {}
        self._bad_weight: str | None = None
        self.specs = snapshot.specs
        self.read = snapshot.read

    # --- for the user

    async def next_batch(self) -> OwnBatch | None:
        """Return the next batch; None when the run is over."""
        if self._delivered:
            msg = (
                "the batch in hand is not done with: call publish() after its optimiser step, or"
                " skip() if you took none"
            )
            raise RuntimeError(msg)
        if self._verdict is None:  # else one has come whose asker was interrupted
            self._wanted.set()
        batch = await self._member.or_end(self._batch)
        self._batch, self._delivered = _future(), batch is not None
        return batch

    async def step_taken(self, metrics: Mapping[str, float]) -> PolicyVersion:
        """Publish the weights; return their number."""
        return await self._judge(True, metrics)

    async def step_skipped(self) -> None:
        """Account for a batch that changed nothing."""
        await self._judge(False, {})

    async def finish(self) -> None:
        """Take no more steps: the last version goes live, and the run ends."""
        if self._verdict is not None:
            msg = "the batch in hand is not done with: call publish() or skip() before finish()"
            raise RuntimeError(msg)
        self._over = True
        self._wanted.set()
        await self._member.ended()

    async def _judge(self, taken: bool, metrics: Mapping[str, float]) -> PolicyVersion:
        if self._verdict is None:
            msg = "there is no batch in hand: take one from batches() first"
            raise RuntimeError(msg)
        verdict, self._verdict, self._delivered = self._verdict, None, False
        self._metrics = metrics
        self._outcome = _future()
        if not verdict.done():
            verdict.set_result(taken)
        version = await self._member.or_end(self._outcome)
        if version is None:
            raise self._member.over()
        return version

    # --- for the trainer

    async def wants_batch(self) -> bool:
        """Wait until the loop asks for a batch, or is over."""
        await self._wait_for_user(self._wanted.wait(), "the loop to ask for a batch")
        self._wanted.clear()
        return not self._over

    def batch_due(self, ready: BatchReady, position: Position) -> None:
        """Keep what `forward_backward` is not given."""
        self._due = (ready, position)
        self._wanted.set()  # until groups of it are handed over

    async def forward_backward(self, groups: Sequence[RolloutGroup]) -> GradientReport:
        """Hand the groups to the loop, and wait for what it makes of them."""
        if self._due is None:
            msg = "a batch was not announced"
            raise RuntimeError(msg)
        ready, position = self._due
        self._wanted.clear()
        batch = OwnBatch(
            ready.batch.step, position.version, tuple(groups), ready.stats, self._config
        )
        verdict = self._verdict = _future()
        self._batch.set_result(batch)
        taken = await self._wait_for_user(verdict, f"publish() or skip() of step {batch.step}")
        return GradientReport(taken, self._metrics)

    async def optimizer_step(self) -> StepReport:
        """Copy what the loop has made."""
        self._bad_weight = await asyncio.to_thread(self._snapshot.take)
        return StepReport(self._bad_weight is None, {})

    async def skip_step(self) -> None:
        """Leave everything as it is."""

    async def probe(self, seed: int) -> WeightProbe | None:
        """Ratchet never runs the module of a loop of the user's own."""
        return None

    def stepped(self, position: Position) -> None:
        """Let the loop go on."""
        outcome, self._outcome = self._outcome, None
        bad_weight, self._bad_weight = self._bad_weight, None
        if outcome is None or outcome.done():
            return
        if bad_weight is None:
            outcome.set_result(position.version)
        else:
            msg = f"{bad_weight} is not finite after the step: nothing was published"
            outcome.set_exception(RunFailed(msg))

    async def start(self) -> None:
        """Copy the weights that the module begins with.

        Raises:
            RunFailed: if they are not finite.
        """
        bad_weight = await asyncio.to_thread(self._snapshot.take)
        if bad_weight is not None:
            msg = f"{bad_weight} is not finite: there is nothing to begin with"
            raise RunFailed(msg)

    async def warm_start(self, prompts: Sequence[Prompt]) -> Mapping[str, float]:
        """Do nothing: how the module came to its weights is the user's affair."""
        del prompts
        return {}

    async def export(self, path: Path) -> None:
        """Do nothing: the module is the user's to save."""

    async def close(self) -> None:
        """Do nothing."""

    async def _wait_for_user(self, awaitable: Awaitable[T], what: str) -> T:
        loop = asyncio.get_running_loop()
        since, within_s = loop.time(), self._patience_s
        waits, name = self._member.system.waits, self._member.role.name
        try:
            with waits.on(who=name, on="own loop", what=what, since=since, until=since + within_s):
                async with asyncio.timeout(within_s):
                    return await awaitable
        except TimeoutError:
            msg = f"{name} waited {within_s:g} s (loop_timeout_s) for {what}"
            raise RunFailed(msg) from None


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()
