"""Every error a user or a peer can meet.

Consumes nothing, waits for nothing. An error that may cross a mailbox link is a `RatchetError`: it
travels as the pair (kind, text) and is rebuilt from the closed table below, so that a peer can
never name a class of its own choosing.
"""

from __future__ import annotations

from typing import Final


class RatchetError(Exception):
    """Base of all errors raised on purpose."""


# --- a user's mistake: the message names the field, the value and the way out; the command exits
# with code 2


class UserError(RatchetError):
    """Something that the user can mend; nothing was written."""


class ConfigError(UserError):
    """A configuration that cannot run."""


class TaskError(UserError):
    """A task, reward or data file that cannot be loaded."""


# --- a run that ended badly: exit code 1


class RunFailed(RatchetError):  # noqa: N818 - reads as the event it reports
    """The run could not go on; the text is its first cause."""


# --- actors and links


class ActorDead(RatchetError):  # noqa: N818
    """The receiver stopped before it handled the message."""


class AskTimeout(RatchetError):  # noqa: N818
    """No reply within the deadline of an ask."""


class HandlerFailed(RatchetError):  # noqa: N818
    """The receiver raised an unexpected exception while it handled an ask."""


class GivenUp(RatchetError):  # noqa: N818
    """The others have given this life of a role up, and what it held; it has to start again."""


class AuthFailed(RatchetError):  # noqa: N818
    """The peer's key, run or protocol version is not ours."""


class ProtocolError(RatchetError):
    """A frame that breaks the protocol: size, depth, order or type."""


# --- versions and weights


class StaleTerm(RatchetError):  # noqa: N818
    """A trainer with an older term tried to publish or train; it is fenced."""


class VersionError(RatchetError):
    """A version number that cannot be committed, burnt or loaded."""


class TransferFailed(RatchetError):  # noqa: N818
    """A weight transfer did not reach an engine."""


class WeightsMismatch(RatchetError):  # noqa: N818
    """What arrived, or what the engine holds, is not what the trainer sent."""


# --- generation and scoring: a failed group, counted; never a zero reward


class GenerationFailed(RatchetError):  # noqa: N818
    """The engine could not produce a completion."""


class EngineLost(RatchetError):  # noqa: N818
    """The engine has gone by itself, or serves what it should not; its worker starts again."""


class PromptTooLong(GenerationFailed):
    """The prompt and its completion do not fit into the model's context."""


class RewardFailed(RatchetError):  # noqa: N818
    """The reward function raised, or returned something that is not a finite number.

    Args:
        text: what happened.
        reason: of the group's failure: "reward_timeout" | "reward_raised" | "reward_exited" |
            "reward_forked" | "reward_memory" | "reward_invalid", or "reward" where nobody knows.
    """

    def __init__(self, text: str = "", reason: str = "reward") -> None:
        super().__init__(text)
        self.reason = reason


_WIRE: Final[dict[str, type[RatchetError]]] = {
    cls.__name__: cls
    for cls in (
        ActorDead,
        AskTimeout,
        HandlerFailed,
        GivenUp,
        StaleTerm,
        VersionError,
        TransferFailed,
        WeightsMismatch,
        GenerationFailed,
        PromptTooLong,
        RewardFailed,
    )
}


def to_wire(error: BaseException) -> tuple[str, str]:
    """Return (kind, text); an error outside the table becomes `HandlerFailed`."""
    if type(error).__name__ in _WIRE and isinstance(error, RatchetError):
        return type(error).__name__, str(error)
    return HandlerFailed.__name__, f"{type(error).__name__}: {error}"


def from_wire(kind: str, text: str) -> RatchetError:
    """Rebuild an error from the pair that `to_wire` made."""
    return _WIRE.get(kind, HandlerFailed)(text)
