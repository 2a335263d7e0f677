"""Making the directory of a run.

Consumes a path and a resolved configuration, produces the directory; waits for nothing. An existing
run is never written over.
"""

from __future__ import annotations

from pathlib import Path

from ratchet.config import Config
from ratchet.errors import ConfigError
from ratchet.observability.rundir import RunDirectory


def create_run_directory(root: Path, config: Config) -> RunDirectory:
    """Make a new run directory with its resolved configuration.

    Raises:
        ConfigError: if there is something already, or it cannot be made.
    """
    run = RunDirectory(root)
    try:
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            msg = (
                f"{root} exists already, and a run is never written over;"
                " give another --dir, or remove it"
            )
            raise ConfigError(msg)
        run.logs.mkdir(parents=True)
        run.config.write_text(config.to_toml(), encoding="utf-8")
    except OSError as error:
        msg = f"cannot make the run directory {root}: {error.strerror}; give another --dir"
        raise ConfigError(msg) from None
    return run
