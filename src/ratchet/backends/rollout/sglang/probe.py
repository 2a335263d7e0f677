"""The proof after a load: a server computes what the trainer's model computes.

Consumes the trainer's log probabilities, produces nothing, or an error that names the largest
difference. Waits for each server to score, up to a deadline; paused ones do not.

What it shows: that the servers took these weights, all of them, and run the same model. What it
cannot show: a difference that stays below the tolerance. Rounding alone moves a log probability by
so much that the tolerance of half precision is wide, far wider than one optimiser step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from ratchet.backends.rollout.sglang.session import ask_all
from ratchet.errors import TransferFailed, WeightsMismatch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from ratchet.backends.rollout.sglang.client import SGLangClient
    from ratchet.types import PolicyVersion, WeightProbe

TOLERANCE: Final[Mapping[str, float]] = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""By the dtype of the model: the largest difference of a log probability that two correct
implementations of it show.
"""


def tolerance_of(configured: float | None, dtype: str) -> float:
    """Return the configured tolerance, or that of the dtype of the model."""
    return configured or TOLERANCE.get(dtype, TOLERANCE["bfloat16"])


class ScoredMeta(msgspec.Struct):
    """What counts in a server's answer."""

    input_token_logprobs: list[tuple[float | None, int, Any]]


class Scored(msgspec.Struct):
    """A server's answer for one sequence."""

    meta_info: ScoredMeta


_decode: Final = msgspec.json.Decoder(list[Scored]).decode


class Difference(NamedTuple):
    """Where a server and the trainer differ most."""

    size: float
    """NaN if the server computed what is not a number"""
    sequence: int
    position: int
    trainer: float
    server: float


async def check_probe(
    servers: Sequence[SGLangClient],
    version: PolicyVersion,
    probe: WeightProbe,
    *,
    tolerance: float,
    timeout_s: float,
    fields: Mapping[str, Any] | None = None,
) -> None:
    """Let every server score the probe's ids, and compare.

    Args:
        servers: that generate now.
        version: of the weights.
        probe: what the trainer's model computes with them.
        tolerance: largest difference of a log probability.
        timeout_s: for each server.
        fields: of the request, such as the adapter.

    Raises:
        WeightsMismatch: if one of them computes something else.
        TransferFailed: if one of them does not answer.
    """
    for server, answers in zip(
        servers,
        await _score(servers, version, probe, timeout_s=timeout_s, fields=fields or {}),
        strict=True,
    ):
        worst = largest_difference(probe, answers)
        if not worst.size <= tolerance:
            msg = (
                f"{server.url} does not compute what the trainer does with version {version}: the"
                f" largest difference of a log probability is {worst.size:.3g} (token"
                f" {worst.position} of sequence {worst.sequence}: {worst.trainer:.6g} at the"
                f" trainer, {worst.server:.6g} at the server), and the tolerance {tolerance:g}"
            )
            raise WeightsMismatch(msg)


def largest_difference(probe: WeightProbe, answers: Sequence[Scored]) -> Difference:
    """Compare what a server answered with the trainer's numbers.

    Args:
        probe: of N sequences.
        answers: of /generate, one for each.

    Raises:
        WeightsMismatch: if the server scored other ids.
    """
    ids = probe.token_ids.numpy().reshape(-1, probe.length)
    trainer = probe.logprobs.numpy().reshape(len(ids), -1)
    server = np.stack([_logprobs(each, own) for each, own in zip(answers, ids, strict=True)])
    sizes = np.abs(server - trainer)
    flat = int(np.argmax(sizes))  # of a NaN, if there is one
    row, column = divmod(flat, trainer.shape[1])
    return Difference(
        size=float(sizes[row, column]),
        sequence=row,
        position=column + 1,
        trainer=float(trainer[row, column]),
        server=float(server[row, column]),
    )


async def _score(
    servers: Sequence[SGLangClient],
    version: PolicyVersion,
    probe: WeightProbe,
    *,
    timeout_s: float,
    fields: Mapping[str, Any],
) -> list[list[Scored]]:
    ids = probe.token_ids.numpy().reshape(-1, probe.length).tolist()
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "extra_key": f"ratchet-probe-{version}",
        **fields,
    }
    try:
        answers = await ask_all(
            servers, lambda server: server.generate(body, timeout_s=timeout_s, decode=_decode)
        )
    except TransferFailed as error:
        raise TransferFailed(f"version {version} could not be proved: {error}") from None
    for server, answer in zip(servers, answers, strict=True):
        if len(answer) != len(ids):
            msg = (
                f"version {version} could not be proved: POST {server.url}/generate scored"
                f" {len(answer)} of {len(ids)} sequences"
            )
            raise TransferFailed(msg)
    return answers


def _logprobs(answer: Scored, ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
    """Return the log probabilities of all tokens but the first; NaN where the server has none."""
    scored = answer.meta_info.input_token_logprobs
    if [token for _, token, _ in scored] != ids.tolist():
        msg = "the server scored other ids than it was given"
        raise WeightsMismatch(msg)
    values = [np.nan if value is None else value for value, _, _ in scored[1:]]
    return np.array(values, np.float64)
