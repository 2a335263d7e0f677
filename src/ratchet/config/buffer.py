"""The section [buffer]: admission, verdicts and batches. Pure; waits for nothing."""

from __future__ import annotations

import math
from typing import Literal, Self, get_args

from pydantic import field_validator, model_validator

from ratchet.config.section import NonNegative, Positive, PositiveFloat, Section, check_choice

FilterName = Literal["zero_spread", "too_short", "too_long", "truncated", "any_aborted"]
UnusedName = Literal["drop", "retry", "mask"]


class BufferConfig(Section):
    """Admission, staleness and batches."""

    batch_groups: Positive
    """Groups that one optimiser step trains."""
    capacity_factor: PositiveFloat = 2.0
    """Finished and in-flight groups together are at most floor(capacity_factor x batch_groups)."""
    max_bytes: Positive | None = None
    """No prompt is issued while the arrays of the finished groups, and as much again for each group
    in flight as the largest so far, exceed this; one batch is always let in.
    """
    max_staleness: NonNegative = 4
    admission: Literal["capacity", "bounded"] = "capacity"
    """ "capacity": issue prompts while there is room; what gets too old goes to the unused handler.
    "bounded": issue only what is sure to be trained within `max_staleness`; a group keeps its place
    until the version trained on it is loaded.
    """
    custom: str | None = None
    """ "module:Class" that chooses the groups of a batch in place of first in, first out; see
    `ratchet.actors.buffer_policy`.
    """
    filters: tuple[str, ...] = ()
    """Finished groups that one of these rejects are dropped; the first to reject is the reason.
    "zero_spread": all rewards are equal, so there is no gradient. "too_short", "too_long": a
    rollout has fewer sampled tokens than `min_tokens`, more than `max_tokens`. "truncated": a
    rollout was cut off at its length limit. "any_aborted": a rollout was aborted, or failed. Or
    "module:function" (group -> bool, True keeps it).
    """
    min_tokens: Positive | None = None
    max_tokens: Positive | None = None
    unused: str = "drop"
    """What happens to aborted, failed and stale groups: "drop"; "retry": issue the prompt again, up
    to `max_retries` times; "mask": train what is left of them; or "module:function"
    (UnusedGroup -> one of the three).
    """
    max_retries: NonNegative = 1
    """Times that the unused handler issues a group again, whichever handler it is."""
    max_reissues: NonNegative = 3
    """Times that a group is issued again because its worker died or let the lease end."""
    batch_filter: str | None = None
    """ "module:function" (groups of a batch -> for each a list of bools, one per rollout): the
    trainer leaves the rollouts with a True out of its step.
    """
    lease_s: PositiveFloat = 180.0
    keep_payloads: bool = True
    """Keep finished groups on disk until a checkpoint contains their step, so that they need not be
    generated again where the buffer, the trainer or a step is lost.
    """

    @field_validator("filters")
    @classmethod
    def _known_filters(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for index, name in enumerate(value):
            check_choice(name, get_args(FilterName))
            if name in value[:index]:
                msg = f"{name!r} is named twice; once is enough"
                raise ValueError(msg)
        return value

    @field_validator("unused")
    @classmethod
    def _known_handler(cls, value: str) -> str:
        return check_choice(value, get_args(UnusedName))

    @field_validator("batch_filter")
    @classmethod
    def _own_function(cls, value: str | None) -> str | None:
        if value is not None and ":" not in value:
            msg = f'{value!r} is not of the form "module:function"'
            raise ValueError(msg)
        return value

    @model_validator(mode="after")
    def _lengths(self) -> Self:
        for name, field in (("too_short", "min_tokens"), ("too_long", "max_tokens")):
            limit = getattr(self, field)
            if (name in self.filters) != (limit is not None):
                is_listed = "is" if name in self.filters else "is not"
                msg = (
                    f"buffer.{field} = {limit}, and {name!r} {is_listed} in buffer.filters ="
                    f" {list(self.filters)}: give both or neither"
                )
                raise ValueError(msg)
        if self.min_tokens and self.max_tokens and self.min_tokens > self.max_tokens:
            msg = (
                f"buffer.min_tokens = {self.min_tokens} is more than buffer.max_tokens ="
                f" {self.max_tokens}: every group would be dropped"
            )
            raise ValueError(msg)
        return self

    @property
    def masks_stale(self) -> bool:
        """Whether a batch may hold tokens past the bound, for the trainer to mask."""
        return self.unused not in {"drop", "retry"}

    @property
    def capacity(self) -> int:
        """Groups that may be finished or in flight at once."""
        return math.floor(self.capacity_factor * self.batch_groups)
