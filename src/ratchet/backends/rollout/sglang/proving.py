"""Which version an engine's servers hold, and since when that is proved.

Consumes loads, produces a version. A paused server computes nothing, so a load ends like this: the
servers name the version and go on, they score the trainer's probe, and only then is it the engine's
version; or it is refused, and they are paused again. What they generate in between is of a version
that may yet be refused: `decided` waits for that, and is unblocked by the end of the proof.

While there is no version, the servers stay paused.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NoReturn

from ratchet.backends.rollout.sglang.probe import check_probe
from ratchet.backends.rollout.sglang.session import UpdateSession
from ratchet.errors import TransferFailed, WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from ratchet.backends.rollout.sglang.client import SGLangClient
    from ratchet.transport.weights.base import TensorSpec
    from ratchet.types import PauseMode, PolicyVersion, WeightProbe


class ProvenWeights:
    """What loads of every kind have in common; with `write` and `_install` it is a `ProbedSink`."""

    def __init__(
        self,
        servers: Sequence[SGLangClient],
        specs: Sequence[TensorSpec],
        *,
        tolerance: float,
        timeout_s: float,
    ) -> None:
        """Hold no version yet.

        Args:
            servers: of one engine; all hold the same weights.
            specs: of what travels.
            tolerance: of the probe.
            timeout_s: of each wait for the servers.
        """
        self.session = UpdateSession(servers)
        self.timeout_s = timeout_s
        self.version: PolicyVersion | None = None
        self.proving: PolicyVersion | None = None
        """named at the servers, which go on with it, and not proved yet"""
        self.mode: PauseMode = "retract"
        self.unstopped: str | None = None
        """why a server may generate with weights that were refused"""
        self._specs = tuple(specs)
        self._tolerance = tolerance
        self._probe: WeightProbe | None = None
        self._verdict: asyncio.Future[bool] | None = None
        self._proved: set[PolicyVersion] = set()
        self._is_over = False

    async def decided(self, version: PolicyVersion) -> bool:
        """Return whether this engine has held a version, proved; waits while it is being proved."""
        if version == self.proving and self._verdict is not None:
            await asyncio.shield(self._verdict)
        return version in self._proved

    def fields(self, version: PolicyVersion) -> Mapping[str, Any]:
        """Return what a request says to be answered by this version; by default nothing, as the
        servers have one only.
        """
        return {}

    def quarantine(self) -> None:
        """Hold no version from here on: a server died, or holds other weights than it should."""
        self._is_over = True
        self.version = None

    # --- `ProbedSink`

    def specs(self) -> Sequence[TensorSpec]:
        """Describe what travels, as the trainer's model names it."""
        return self._specs

    def expect(self, probe: WeightProbe | None) -> None:
        """Take what the trainer's model computes with the weights to come."""
        self._probe = probe

    async def pause(self, mode: PauseMode) -> None:
        """Stop all servers between two tokens. Idempotent. "in_place" is "retract" on servers that
        overlap steps: paused in place, they keep a token that old weights have made, and give it
        the name of the new ones when they go on.
        """
        if mode == "in_place" and await self.session.overlaps():
            mode = "retract"
        self.mode = mode
        self.session.is_open = False  # what a load that failed has left: each begins with its own
        await self.session.pause(mode)

    async def leave(self) -> None:
        """Give up what the servers keep for loads."""

    @abstractmethod
    async def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take a part of the weights."""

    async def read(self, names: Sequence[str]) -> NoReturn:
        """Raise `WeightsMismatch`: SGLang gives no weights back."""
        msg = f"{', '.join(names)}: SGLang gives no weights back; a probe proves them"
        raise WeightsMismatch(msg)

    async def stamp(self, version: PolicyVersion) -> None:
        """Let the servers go on with what was written, and prove it.

        Raises:
            WeightsMismatch: if a server computes something else than the trainer.
            TransferFailed: if one of them is gone, or refuses.
        """
        await self._install(version)
        verdict = self._verdict = asyncio.get_running_loop().create_future()
        self.proving = version
        try:
            await self.session.resume()
            await self._prove(version)
            if self._is_over:
                msg = f"the engine was lost while version {version} was proved"
                raise TransferFailed(msg)
            self._proved.add(version)
            self.version = version
            await self._proven()
        except BaseException:
            await self._refuse()
            raise
        finally:
            self.proving = None
            verdict.set_result(version in self._proved)

    async def resume(self) -> None:
        """Go on; without a version the servers stay paused. Idempotent."""
        if self.version is not None:
            await self.session.resume()

    # --- what loads of a kind do

    async def _install(self, version: PolicyVersion) -> None:
        """Make what was written what the servers generate with as soon as they go on, under the
        name of this version. By default end their session.
        """
        await self.session.end()
        if self.mode == "retract":
            await self.session.flush()
        await self.session.set_version(version)

    async def _proven(self) -> None:
        """Clean up after what was there before."""

    async def _refuse(self) -> None:
        """Generate nothing more with what was installed."""
        self.version = None
        try:
            await self.session.pause(self.mode)
        except TransferFailed as error:  # the load has failed for another reason, which is told
            self.unstopped = str(error)

    async def _prove(self, version: PolicyVersion) -> None:
        if self._probe is None:
            return
        await check_probe(
            self.session.servers,
            version,
            self._probe,
            tolerance=self._tolerance,
            timeout_s=self.timeout_s,
            fields=self.fields(version),
        )
