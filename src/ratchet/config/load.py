"""From a TOML file, overrides or plain data to a `Config`, or an error that names each field.

Waits for the disk only.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_args

from pydantic import BaseModel, ValidationError

from ratchet.config.run import Config
from ratchet.errors import ConfigError

_CUTS: Final = frozenset(
    f"rollout.{name}"
    for name in (
        *("top_p", "top_k", "min_p"),
        *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    )
)
"""Common settings of samplers that take tokens out of the distribution, or weigh them anew."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Read and validate a TOML file; the name defaults to the file's stem.

    Args:
        path: the file.
        overrides: "section.key=value", where the value is TOML, or a bare string.

    Raises:
        ConfigError: if the file is missing, is not TOML, or breaks a rule; the text names each
        field.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"cannot read the configuration {path}: {error.strerror}"
        raise ConfigError(msg) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        msg = f"{path} is not valid TOML: {error}"
        raise ConfigError(msg) from None
    data.setdefault("name", path.stem)
    for override in overrides:
        _apply(data, override)
    return parse_config(data, source=str(path))


def parse_config(data: Mapping[str, Any], source: str = "configuration") -> Config:
    """Validate plain data.

    Raises:
        ConfigError: with one line per problem.
    """
    try:
        return Config.model_validate_json(_json(data, source))
    except ValidationError as error:
        lines = [_explain(details) for details in error.errors(include_url=False)]
        msg = f"{source}: " + ("; ".join(lines) if len(lines) == 1 else "\n  " + "\n  ".join(lines))
        raise ConfigError(msg) from None


def _json(data: Mapping[str, Any], source: str) -> bytes:
    # JSON mode of pydantic is strict about types and still takes an array for a tuple
    import msgspec

    for name in _not_numbers(data):  # which JSON does not have
        msg = f"{source}: {name} has to be a finite number"
        raise ConfigError(msg)
    try:
        return msgspec.json.encode(data)
    except TypeError as error:
        msg = f"{source}: {error}"
        raise ConfigError(msg) from None


def _not_numbers(data: Any, name: str = "") -> Iterator[str]:
    """Yield each field that holds no number, with its value."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _not_numbers(value, f"{name}.{key}".strip("."))
    elif isinstance(data, list):
        for value in data:
            yield from _not_numbers(value, name)
    elif isinstance(data, float) and not math.isfinite(data):
        yield f"{name} = {data}"


def _apply(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        msg = f"--set {override!r} is not of the form section.key=value"
        raise ConfigError(msg)
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    node = data
    for part in parts[:-1]:
        child = node.setdefault(part, {})
        if not isinstance(child, dict):
            msg = f"--set {override!r}: {part} is a value, not a section"
            raise ConfigError(msg)
        node = child
    node[parts[-1]] = value


def _explain(details: Mapping[str, Any]) -> str:
    location = [str(part) for part in details["loc"]]
    field = ".".join(location)
    if details["type"] == "extra_forbidden":
        if field in _CUTS:
            return (
                f"{field} is not supported by any engine: the trainer computes with the whole"
                " distribution softmax(logits / temperature), and tokens have to be sampled from"
                " that very one; leave it out"
            )
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(location[-1], known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
        return f"unknown key {field!r}; {hint}"
    if details["type"] == "missing":
        return f"{field} is missing"
    text = str(details["msg"]).removeprefix("Value error, ")
    if details["type"] == "value_error":
        return f"{field}: {text}" if field else text
    return f"{field} = {details['input']!r}: {text}"


def _known_keys(location: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in location:
        if part.isdigit():  # the n-th of an array of tables
            continue
        annotation = model.model_fields[part].annotation
        choices = get_args(annotation) or (annotation,)  # a section may be optional
        section = next((each for each in choices if _is_section(each)), None)
        if section is None:
            return []
        model = section
    return sorted(model.model_fields)


def _is_section(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
