"""Which messages an actor class accepts, and whether its `receive` handles each of them.

Pure, and run when a class is defined: a message that an actor declares and forgets to handle is a
`TypeError` on import, not a dead letter at night. The type checker proves the same from the other
side, through `assert_never`.
"""

from __future__ import annotations

import inspect
import types
from typing import Any, ForwardRef, TypeVar, Union, get_args, get_origin, get_type_hints


def declared_union(cls: type, root: type) -> Any:
    """The type that `cls` gives to the message parameter of `root`, from `root[...]` in its bases.

    It may still hold type variables, when `cls` is generic itself. None if no base says.
    """
    for base in vars(cls).get("__orig_bases__", ()):
        origin = get_origin(base)
        if origin is root:
            return get_args(base)[0]
        if isinstance(origin, type) and issubclass(origin, root):
            declared = declared_union(origin, root)
            if declared is None:
                continue
            parameters = getattr(origin, "__parameters__", ())
            values = dict(zip(parameters, get_args(base), strict=True))
            return Union[tuple(values.get(m, m) for m in _members(declared, origin))]  # noqa: UP007
    return None


def accepted(cls: type, root: type) -> frozenset[type] | None:
    """The message classes that `cls` accepts; None where a type variable is still open."""
    declared = declared_union(cls, root)
    if declared is None:
        return None
    members = _members(declared, cls)
    if any(isinstance(member, TypeVar) for member in members):
        return None
    return frozenset(members)


def unhandled(cls: type, messages: frozenset[type]) -> list[str]:
    """Names of the messages that `cls.receive` never mentions; `case X():` mentions X."""
    mentioned: set[str] | None = None
    for base in cls.__mro__:
        receive = vars(base).get("receive")
        if getattr(receive, "__isabstractmethod__", False):
            break
        if receive is not None:
            names = inspect.unwrap(receive).__code__.co_names
            mentioned = {*(mentioned or ()), *names}
            if "super" not in names:
                break
    if mentioned is None:
        return []  # receive is still to be written
    return sorted(m.__name__ for m in messages if m.__name__ not in mentioned)


def _members(declared: Any, cls: type) -> list[Any]:
    """Flatten a union; resolve names given as strings in the module of `cls`."""
    if isinstance(declared, str | ForwardRef):
        text = declared if isinstance(declared, str) else declared.__forward_arg__
        holder = type("_", (), {"__annotations__": {"m": text}, "__module__": cls.__module__})
        return _members(get_type_hints(holder)["m"], cls)
    if get_origin(declared) in {Union, types.UnionType}:
        return [member for part in get_args(declared) for member in _members(part, cls)]
    if not isinstance(declared, type | TypeVar):
        raise TypeError(f"{cls.__name__}: {declared!r} is not a message class or a union of them")
    return [declared]
