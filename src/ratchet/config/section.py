"""What every section of the configuration is made of. Pure; waits for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """One table of the file: frozen, strict, and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def check_choice(choice: str, known: Sequence[str]) -> str:
    """Return the choice, if it is a known name or code of the user's own.

    Raises:
        ValueError: if it is neither.
    """
    if choice not in known and ":" not in choice:
        msg = (
            f"{choice!r} is not known; use one of {', '.join(known)}, or"
            ' "module:function" to bring your own'
        )
        raise ValueError(msg)
    return choice
