"""What the trainer writes into the run directory: metrics, summary and model.

Consumes the trainer's numbers; each file has this one writer, the newest life of the trainer. Waits
for the disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ratchet.backends.training.base import TrainingBackend
from ratchet.observability.metrics import MetricsWriter
from ratchet.observability.rundir import RunDirectory
from ratchet.runtime.rundir import put_aside


class RunOutput:
    """The trainer's files."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._metrics: MetricsWriter | None = None
        self._evaluations: MetricsWriter | None = None

    def begin(self, step: int) -> None:
        """Begin to write, with weights of a step; what was written past it is put aside."""
        put_aside(self._run, step)
        self._metrics = MetricsWriter(self._run.metrics)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        if self._metrics is None:
            self._metrics = MetricsWriter(self._run.metrics)
        self._metrics.write(metrics)

    def evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Append one line to evals.jsonl, which the first one makes."""
        if self._evaluations is None:
            self._evaluations = MetricsWriter(self._run.evals)
        self._evaluations.write(evaluation)

    def summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, whole or not at all."""
        text = msgspec.json.format(msgspec.json.encode(dict(summary)), indent=2)
        temporary = self._run.summary.with_suffix(".tmp")
        temporary.write_bytes(text + b"\n")
        temporary.replace(self._run.summary)

    async def model(self, backend: TrainingBackend) -> None:
        """Write the trained model as Hugging Face safetensors."""
        await backend.export(self._run.model)
