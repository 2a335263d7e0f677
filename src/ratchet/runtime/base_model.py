"""The model that a run starts from: the user's directory, or a fresh one built once per run.

Consumes `[model]`, produces a directory in the Hugging Face layout; waits for nothing. Trainer and
engines may all ask at once: each builds the same model from the seed, and the first rename wins.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from ratchet.config import Config


def ensure_base_model(config: Config, base: Path) -> Path:
    """Return the directory of the base model; build it at `base` if `model.build` says so.

    Raises:
        ConfigError: if `model.build` is not a model.
    """
    model = config.model
    if model.build is None or model.tokenizer_chars is None:
        return Path(model.path or "")
    if base.exists():
        return base
    # transformers takes seconds, and a directory may be for a backend that does without
    from ratchet.backends.models import build_model, char_tokenizer, save_model_directory

    tokenizer = char_tokenizer(model.tokenizer_chars)
    built = build_model(model.build, config.seed, tokenizer)
    with tempfile.TemporaryDirectory(dir=base.parent, prefix=f"{base.name}.tmp-") as temporary:
        whole = Path(temporary) / base.name
        save_model_directory(built, tokenizer, whole)
        try:
            whole.rename(base)
        except OSError:  # another one was first: its model is the same
            if not base.exists():
                raise
    return base
