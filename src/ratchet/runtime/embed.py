"""`ratchet.join`: be a part of a run from a program of your own.

Consumes a run directory, or the address of a registry and the token of the run; produces a `Guest`,
which can take the place of the trainer, add a producer of rollouts, look at the run and end it.
Waits for the registry at the start. Leaving does not end the run.

    with ratchet.join("runs/copy") as run:
        trainer = run.trainer(model)
        for batch in trainer.batches(steps=100):
            loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            trainer.publish()
        trainer.finish()

`join_async` is the same with `async with`, `async for` and `await`. Either way the links are served
by a thread of their own, and your code may compute as long as it likes.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from ratchet.config import Config, TlsConfig
from ratchet.runtime.embed_guest import Host
from ratchet.runtime.embed_link import BackgroundLoop, find_run
from ratchet.status import RunStatus
from ratchet.tasks.base import Task
from ratchet.tasks.registry import build_task

if TYPE_CHECKING:
    import torch

    from ratchet.runtime.embed_producer import AsyncProducer, Producer
    from ratchet.runtime.embed_trainer import AsyncTrainer, Trainer
    from ratchet.runtime.run import Run

LOOP_TIMEOUT_S: Final = 3600.0
"""How long a training loop may take between two calls, unless it says otherwise."""


class _Guest:
    """What both kinds of guest know of the run."""

    def __init__(self, background: BackgroundLoop, host: Host) -> None:
        self._background = background
        self._host = host

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._host.run_id

    @property
    def config(self) -> Config:
        """The run's configuration, resolved."""
        return self._host.config

    @cached_property
    def task(self) -> Task:
        """The run's task: its prompts, and `score(prompt, completion)`."""
        return build_task(self.config.task, self.config.seed)

    @cached_property
    def base_model(self) -> Path:
        """Directory of the model that the run starts from, in the Hugging Face layout."""
        return self._host.base_model()


class Guest(_Guest):
    """A part of a run that is a program of its own. Made by `join`."""

    def trainer(
        self,
        model: torch.nn.Module,
        *,
        name: str | None = None,
        loop_timeout_s: float = LOOP_TIMEOUT_S,
    ) -> Trainer:
        """Take the next term: from now on this program trains, and every trainer before it is
        fenced. What `model` holds is published at once.

        Args:
            model: its parameters and persistent buffers have the names, shapes and dtypes of the
                model that the engines have loaded.
            name: in status and logs; a new one by default.
            loop_timeout_s: how long your loop may take between two calls.

        Raises:
            ConfigError: the transport cannot run here as configured.
        """
        from ratchet.runtime.embed_trainer import Trainer, start_trainer

        started = self._background.call(start_trainer(self._host, model, name, loop_timeout_s))
        return Trainer(self._background, *started)

    def producer(self, *, name: str | None = None, ahead: int = 0) -> Producer:
        """Add a producer of rollouts beside those that the run has.

        Args:
            name: in status and logs; a new one by default.
            ahead: prompts that are claimed before you ask for them.
        """
        from ratchet.runtime.embed_producer import Producer, start_producer

        return Producer(
            self._background, self._background.call(start_producer(self._host, name, ahead))
        )

    def status(self) -> RunStatus:
        """Return the run as its registry sees it."""
        return self._background.call(self._host.status())

    def end(self, reason: str) -> None:
        """End the run, for everyone."""
        self._background.call(self._host.end(reason))

    def close(self) -> None:
        """Leave the run, which goes on. Idempotent."""
        if not self._background.closed:
            try:
                self._background.call(self._host.leave())
            finally:
                self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncGuest(_Guest):
    """`Guest`, for code that awaits. Made by `join_async`."""

    async def trainer(
        self,
        model: torch.nn.Module,
        *,
        name: str | None = None,
        loop_timeout_s: float = LOOP_TIMEOUT_S,
    ) -> AsyncTrainer:
        """Take the next term: see `Guest.trainer`."""
        from ratchet.runtime.embed_trainer import AsyncTrainer, start_trainer

        started = await self._background.acall(
            start_trainer(self._host, model, name, loop_timeout_s)
        )
        return AsyncTrainer(self._background, *started)

    async def producer(self, *, name: str | None = None, ahead: int = 0) -> AsyncProducer:
        """Add a producer of rollouts: see `Guest.producer`."""
        from ratchet.runtime.embed_producer import AsyncProducer, start_producer

        own = await self._background.acall(start_producer(self._host, name, ahead))
        return AsyncProducer(self._background, own)

    async def status(self) -> RunStatus:
        """Return the run as its registry sees it."""
        return await self._background.acall(self._host.status())

    async def end(self, reason: str) -> None:
        """End the run, for everyone."""
        await self._background.acall(self._host.end(reason))

    async def close(self) -> None:
        """Leave the run, which goes on. Idempotent."""
        if not self._background.closed:
            try:
                await self._background.acall(self._host.leave())
            finally:
                self._background.close()


class join_async:  # noqa: N801 - `async with ratchet.join_async(...)`, like `join`
    """Join a run in an `async with` statement; the arguments and errors are those of `join`."""

    def __init__(
        self,
        run: Run | str | Path,
        *,
        token_file: str | Path | None = None,
        tls: TlsConfig | None = None,
        host: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self._entering = _enter(run, token_file, tls, host, timeout_s)
        self._guest: AsyncGuest | None = None

    async def __aenter__(self) -> AsyncGuest:
        background = BackgroundLoop()
        try:
            self._guest = AsyncGuest(background, await background.acall(self._entering))
        except BaseException:
            background.close()
            raise
        return self._guest

    async def __aexit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._guest is not None:
            await self._guest.close()


def join(
    run: Run | str | Path,
    *,
    token_file: str | Path | None = None,
    tls: TlsConfig | None = None,
    host: str | None = None,
    timeout_s: float = 30.0,
) -> Guest:
    """Join a run; use the result in a `with` statement, or `close` it.

    Args:
        run: a `Run` of this process, the directory of a run, or the address of its registry:
            "HOST:PORT", "tcp:HOST:PORT" or "unix:/path".
        token_file: the secret of the run; a directory says where it lies.
        tls: this node's certificate; a directory says which one.
        host: address of this machine that the others reach; by default that of the interface from
            which the registry is reached.
        timeout_s: how long to wait for the registry.

    Raises:
        ConfigError: it is no run, or the token or certificate cannot be used.
        AuthFailed: the registry does not take them.
        AskTimeout: the registry cannot be reached in time.
        RunFailed: the directory does not say in time where the registry is.
    """
    background = BackgroundLoop()
    try:
        host_of_run = background.call(_enter(run, token_file, tls, host, timeout_s))
    except BaseException:
        background.close()
        raise
    return Guest(background, host_of_run)


async def _enter(
    run: Run | str | Path,
    token_file: str | Path | None,
    tls: TlsConfig | None,
    host: str | None,
    timeout_s: float,
) -> Host:
    place = run if isinstance(run, str | Path) else run.directory.root
    invitation = await asyncio.to_thread(
        find_run, place, token_file=token_file, tls=tls, host=host, timeout_s=timeout_s
    )
    return await Host.enter(invitation, timeout_s)
