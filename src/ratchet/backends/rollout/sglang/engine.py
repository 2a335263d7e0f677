"""The rollout engine in front of SGLang servers.

Consumes requests and weights, produces completions: `generation.py` has the requests, `weights.py`
and what it builds on the weights, `fleet.py` the servers. Waits for the servers to start and to
answer, and for a version. From the moment that a server is lost, or found with weights that this
run has not sent it, the engine has no version and fails every call, and `watch` raises.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ratchet.backends.rollout.base import Completion, EngineStats, SamplingParams
from ratchet.backends.rollout.sglang.adapter import AdapterShape, AdapterWeights
from ratchet.backends.rollout.sglang.answers import Limits
from ratchet.backends.rollout.sglang.direct import DirectWeights
from ratchet.backends.rollout.sglang.fleet import Fleet, Member, open_fleet
from ratchet.backends.rollout.sglang.generation import Generation
from ratchet.backends.rollout.sglang.model import ServedModel
from ratchet.backends.rollout.sglang.probe import tolerance_of
from ratchet.backends.rollout.sglang.proving import ProvenWeights
from ratchet.backends.rollout.sglang.weights import RelayedWeights
from ratchet.config.transfer import DIRECT
from ratchet.errors import EngineLost, GenerationFailed, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ratchet.config import Config
    from ratchet.transport.weights.base import TensorSpec
    from ratchet.types import PauseMode, PolicyVersion, WeightProbe


def create_engine(config: Config, model_dir: Path) -> SGLangEngine:
    """Make the engine of a configuration; `model_dir` is the base model's directory."""
    return SGLangEngine(config, model_dir)


class _Parts(NamedTuple):
    """What `start` opens."""

    fleet: Fleet
    model: ServedModel
    weights: ProvenWeights
    generation: Generation
    watch: asyncio.Task[None]


class SGLangEngine:
    """A `RolloutEngine` and `ProbedSink`; one rollout worker owns it, and its servers."""

    def __init__(self, config: Config, model_dir: Path) -> None:
        self._config = config
        self._model_dir = model_dir
        self._log: Path | None = None
        self._own_log: tempfile.TemporaryDirectory[str] | None = None
        self._parts: _Parts | None = None
        self._lost: asyncio.Future[str] | None = None
        self._is_closed = False

    # --- life

    def log_to(self, path: Path) -> None:
        """Let the output of a launched server go to a file, in the place of one that is removed."""
        self._log = path

    async def start(self) -> None:
        """Launch or find the servers; they hold no version yet.

        Raises:
            ConfigError: if the model, a server or the configuration cannot be used.
            EngineLost: if a server does not start.
        """
        sglang, model_config = self._config.rollout.sglang, self._config.model
        model = await asyncio.to_thread(ServedModel.read, self._model_dir, model_config)
        shape = None
        if model_config.lora is not None:
            shape = await asyncio.to_thread(
                AdapterShape.read, self._model_dir, model_config.dtype, model_config.lora
            )
        fleet = await open_fleet(
            sglang,
            model=self._model_dir,
            dtype=model_config.dtype,
            lora=model_config.lora,
            log=self._log or self._make_log(),
        )
        self._lost = asyncio.get_running_loop().create_future()
        weights = self._make_weights(fleet.members, model, shape)
        generation = Generation(
            fleet.generation,
            [member.client for member in fleet.members],
            limits=Limits.of(model.vocabulary, min(member.context for member in fleet.members)),
            end_ids=model.text.end_ids,
            timeout_s=sglang.request_timeout_s,
            decided=weights.decided,
            lost=self._lose,
        )
        watch = asyncio.create_task(self._watch(fleet, generation))
        self._parts = _Parts(fleet, model, weights, generation, watch)

    async def watch(self) -> None:
        """Wait until the engine cannot serve any more.

        Raises:
            EngineLost: then, with the reason.
        """
        assert self._lost is not None  # noqa: S101 - the engine was started
        watch = self._started.watch
        either: set[asyncio.Future[Any]] = {self._lost, watch}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            watch.result()  # an error in the watch itself
        raise EngineLost(self._lost.result())

    async def close(self) -> None:
        """Fail what is in flight, and end what was launched. Idempotent."""
        self._is_closed = True
        if (parts := self._parts) is not None:
            parts.watch.cancel()
            parts.weights.quarantine()
            try:  # at once: each waits for a server that hangs
                await asyncio.gather(parts.generation.close(), parts.weights.leave())
            finally:
                await parts.fleet.close()
                await asyncio.wait([parts.watch])
        if self._own_log is not None:
            self._own_log.cleanup()

    # --- requests

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Generate one completion; see `RolloutEngine.generate`. The seed counts only where the
        servers run with `--enable-deterministic-inference`.
        """
        return await self._started.generation.generate(prompt_ids, params)

    def encode(self, text: str) -> list[int]:
        """Turn a prompt into ids."""
        return self._started.model.text.encode(text)

    def encode_reply(self, text: str) -> list[int]:
        """Turn a message of the environment into ids behind a turn of the policy."""
        return self._started.model.text.encode_reply(text)

    @property
    def context(self) -> int | None:
        """Tokens that the servers take: the model's, but for some that SGLang keeps."""
        return self._started.generation.limits.context

    def decode(self, token_ids: Sequence[int]) -> str:
        """Turn ids into text, without the end of sequence."""
        return self._started.model.text.decode(token_ids)

    def stats(self) -> EngineStats:
        """Return the running totals; see `Generation.stats`."""
        if self._parts is None:
            return EngineStats(0.0, 0.0, 0, 0, 0)
        return self._parts.generation.stats()

    # --- weights

    @property
    def version(self) -> PolicyVersion | None:
        """The version that generates now, proved."""
        return None if self._parts is None else self._parts.weights.version

    def specs(self) -> Sequence[TensorSpec]:
        """Describe what travels, as the trainer's model names it."""
        return self._started.weights.specs()

    def expect(self, probe: WeightProbe | None) -> None:
        """Take what the trainer's model computes with the weights to come."""
        self._started.weights.expect(probe)

    async def pause(self, mode: PauseMode) -> None:
        """Stop all servers between two tokens. One that cannot be stopped while the engine has no
        version ends it: nothing else looks after a server that holds none.

        Raises:
            TransferFailed: if one of them is gone, or refuses.
        """
        self._started.generation.pause()
        try:
            await self._started.weights.pause(mode)
        except TransferFailed as error:
            if self.version is None:
                self._lose(str(error))
            raise

    @property
    def outside(self) -> DirectWeights | None:
        """The servers, where they take weights from the trainer itself."""
        weights = self._started.weights
        return weights if isinstance(weights, DirectWeights) else None

    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Send tensors to the servers; quarantined until `stamp`."""
        self._started.generation.hold()
        await self._started.weights.write(tensors)

    async def read(self, names: Sequence[str]) -> Sequence[torch.Tensor]:
        """Raise `WeightsMismatch`: SGLang gives no weights back."""
        return await self._started.weights.read(names)

    async def stamp(self, version: PolicyVersion) -> None:
        """Let the servers generate with what was written, and prove that they do.

        Raises:
            WeightsMismatch: if they compute something else than the trainer.
            TransferFailed: if one of them is gone, or refuses.
        """
        parts = self._started
        parts.generation.hold()
        try:
            await parts.weights.stamp(version)
        except BaseException:
            # what runs may have tokens of weights that have the version's name, and not its values
            parts.generation.refuse(f"version {version} was refused")
            if parts.weights.unstopped is not None:  # as in `pause`
                self._lose(parts.weights.unstopped)
            raise
        parts.generation.serve(version, parts.weights.fields(version))

    async def resume(self) -> None:
        """Go on generating, as soon as there is a version. A server that does not go on ends the
        engine, as it would stay paused, and is a `TransferFailed`.
        """
        try:
            await self._started.weights.resume()
        except TransferFailed as error:
            self._lose(str(error))
            raise
        self._started.generation.resume()

    # --- inside

    @property
    def _started(self) -> _Parts:
        if self._parts is None:
            msg = "the engine was closed" if self._is_closed else "the engine was not started"
            raise GenerationFailed(msg)
        return self._parts

    def _make_weights(
        self, members: Sequence[Member], model: ServedModel, shape: AdapterShape | None
    ) -> ProvenWeights:
        servers = [member.client for member in members]
        sizes = [member.tp for member in members]
        sglang = self._config.rollout.sglang
        tolerance = tolerance_of(sglang.probe_tolerance, self._config.model.dtype)
        if shape is not None:
            return AdapterWeights(
                servers,
                shape,
                directory=None if sglang.adapter_dir is None else Path(sglang.adapter_dir),
                tolerance=tolerance,
                timeout_s=sglang.control_timeout_s,
            )
        if self._config.effective_weights.transport == DIRECT:
            return DirectWeights(
                servers,
                sizes,
                model.specs,
                hold=lambda: self._started.generation.hold(),
                lost=self._lose,
                tolerance=tolerance,
                timeout_s=sglang.control_timeout_s,
            )
        return RelayedWeights(
            servers,
            sizes,
            model.specs,
            host=self._config.runtime.host,
            tolerance=tolerance,
            timeout_s=sglang.control_timeout_s,
        )

    def _make_log(self) -> Path:
        self._own_log = tempfile.TemporaryDirectory(prefix="ratchet-sglang-")
        return Path(self._own_log.name) / "server.log"

    async def _watch(self, fleet: Fleet, generation: Generation) -> None:
        def serving() -> str | None:
            return None if generation.sends is None else str(generation.sends)

        self._lose(str(await fleet.watch(serving)))

    def _lose(self, reason: str) -> None:
        if self._parts is None or self._lost is None or self._lost.done():
            return
        self._parts.weights.quarantine()
        self._parts.generation.fail(reason)
        self._lost.set_result(reason)
