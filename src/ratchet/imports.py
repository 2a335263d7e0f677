"""Loading what a user names: a built-in by its name, or "module:object" from code of their own.

Consumes a reference and the interpreter's import path, produces the object; waits for nothing. A
registry is a table from names to references, so that nothing heavy is imported before it is chosen.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from ratchet.errors import ConfigError


def import_chosen(field: str, choice: str, known: Mapping[str, str]) -> Callable[..., Any]:
    """Return the callable that a configuration field chooses: by a name of the table `known`, or by
    "module:object".

    Raises:
        ConfigError: if the name is not in the table, or the reference gives nothing to call.
    """
    check_choice(field, choice, known)
    found = import_object(known.get(choice, choice))
    if not callable(found):
        msg = f"{field} = {choice!r} names a {type(found).__name__}, which cannot be called"
        raise ConfigError(msg)
    return found


def check_choice(field: str, choice: str, known: Collection[str]) -> None:
    """Check a choice without importing anything.

    Raises:
        ConfigError: if it is neither a known name nor of the form "module:object".
    """
    if choice not in known and ":" not in choice:
        msg = (
            f"{field} = {choice!r} is not known; use one of {', '.join(sorted(known))}, or"
            ' "module:object" to bring your own'
        )
        raise ConfigError(msg)


def import_for(field: str, reference: str) -> object:
    """Return the object that a configuration field names, as "module:object".

    Raises:
        ConfigError: if it does not import; the text begins with the field.
    """
    try:
        return import_object(reference)
    except ConfigError as error:
        msg = f"{field}: {error}"
        raise ConfigError(msg) from error


def import_object(reference: str) -> object:
    """Return the object that "module:object" or "path/to/file.py:object" names.

    A file is executed once per process, however often it is named; a relative path starts at the
    working directory.

    Raises:
        ConfigError: if the reference is malformed, the module does not import, or it has no such
            object; the text names the reference and the way out.
    """
    module_name, separator, attribute = reference.rpartition(":")
    if not separator or not module_name or not attribute:
        msg = f'{reference!r} is not of the form "module:object" or "path/to/file.py:object"'
        raise ConfigError(msg)
    if module_name.endswith(".py"):
        module = _import_file(reference, Path(module_name))
    else:
        module = _import_module(reference, module_name)
    try:
        found: object = getattr(module, attribute)
    except AttributeError:
        public = sorted(name for name in vars(module) if not name.startswith("_"))
        msg = f"{reference!r}: {module_name} has no {attribute!r}; it has: {', '.join(public)}"
        raise ConfigError(msg) from None
    return found


def _import_module(reference: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise _broken(reference, error) from error
        msg = (
            f"{reference!r}: there is no module {error.name!r} on the import path; install it, put"
            ' its folder on PYTHONPATH, or give the file itself: "path/to/file.py:object"'
        )
        raise ConfigError(msg) from None
    except (Exception, SystemExit) as error:
        raise _broken(reference, error) from error


def _import_file(reference: str, path: Path) -> ModuleType:
    resolved = path.expanduser().resolve()
    if not resolved.is_file():
        msg = f"{reference!r}: there is no file {resolved}"
        raise ConfigError(msg)
    digest = hashlib.sha256(str(resolved).encode()).hexdigest()[:12]
    name = f"_ratchet_user_{resolved.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        msg = f"{reference!r}: {resolved} cannot be loaded as Python"
        raise ConfigError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and msgspec look their module up while it executes
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _broken(reference, error) from error
    return module


def _broken(reference: str, error: Exception | SystemExit) -> ConfigError:
    return ConfigError(f"{reference!r} failed while importing: {type(error).__name__}: {error}")
