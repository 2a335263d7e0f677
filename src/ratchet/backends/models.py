"""Models and tokenizers from a local directory, or fresh ones from a config: what the engines and
the trainer share.

Consumes a directory in the Hugging Face layout, or a config and the characters of a tokenizer;
produces models in evaluation mode, tokenizers and directories. Never goes online, never runs code
from a directory, never unpickles: weights are safetensors. Waits for the disk only.
"""

from __future__ import annotations

import contextlib
import difflib
import threading
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from ratchet.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"

_UNUSABLE: Final = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
)
"""What transformers raises on a config or a directory that it cannot use."""

_BUILDING: Final = threading.Lock()
"""transformers builds models under settings of the whole process (default dtype, skipped
initialisation, tying), and engine and trainer may live in one: two threads must take turns."""

_LEGACY_KEYS: Final = frozenset({"rope_theta", "rope_scaling", "rope_parameters", "head_dim"})
"""Config keys that are taken even where the defaults do not list them."""


def load_model(path: Path, dtype: str) -> PreTrainedModel:
    """Load a causal language model from a local directory, in evaluation mode.

    Args:
        path: holds config.json and *.safetensors.
        dtype: torch name without the prefix, e.g. "float32", "bfloat16".

    Raises:
        ConfigError: if the directory is missing, is no model, holds no safetensors, or its weights
            do not fill the model.
    """
    _check_directory(path)
    with building():
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                path,
                dtype=getattr(torch, dtype),
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
        except _UNUSABLE as error:
            raise _unusable(path, error) from error
    missing = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if missing:
        # transformers would fill them with random numbers and say so in a log line
        msg = (
            f"model.path = {str(path)!r}: the weights do not fill the model; missing or of another"
            f" shape: {', '.join(missing[:5])} ({len(missing)} in all). Give a directory written"
            " by save_pretrained for this very config.json"
        )
        raise ConfigError(msg)
    return model.eval()


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local directory.

    Raises:
        ConfigError: if the directory is missing or holds no tokenizer.
    """
    _check_directory(path)
    with _quiet():
        try:
            return AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except _UNUSABLE as error:
            raise _unusable(path, error) from error


def build_model(
    config: Mapping[str, Any], seed: int, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Build a float32 model with random weights, in evaluation mode.

    Args:
        config: a Hugging Face config, `model_type` included. What it leaves out of `vocab_size`
            and the ids of pad, eos and bos comes from the tokenizer.
        seed: of the weights; the global generator of torch is left as it was.
        tokenizer: the one that the model will be used with.

    Raises:
        ConfigError: if the model type or a key is unknown, or a value does not work.
    """
    parsed = _parse_config(config, tokenizer)
    with building(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(parsed, dtype=torch.float32)
        except (*_UNUSABLE, ZeroDivisionError) as error:
            msg = f"model.build = {dict(config)!r} is not a model: {_first_line(error)}"
            raise ConfigError(msg) from error
    return model.eval()


def char_tokenizer(chars: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token per character: <pad> 0, <eos> 1, <unk> 2, then `chars`.

    Raises:
        ConfigError: if there are no characters, or one occurs twice.
    """
    repeated = sorted({char for char in chars if chars.count(char) > 1})
    if repeated or not chars:
        problem = f"{''.join(repeated)!r} occurs more than once" if chars else "no characters"
        msg = f"model.tokenizer_chars = {chars!r}: {problem}; give each character once"
        raise ConfigError(msg)
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *chars])}
    core = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase, text: str, *, chat_template: bool
) -> list[int]:
    """Return the ids of a prompt: alike in an engine, in a warm start and in the launcher's checks.

    Args:
        tokenizer: the model's.
        text: the prompt.
        chat_template: wrap it as a user message that the model is about to answer.
    """
    if not chat_template:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    return list(
        tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    )


def save_model_directory(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path
) -> None:
    """Write model, config and tokenizer as Hugging Face safetensors into a new directory.

    Raises:
        FileExistsError: if `path` is there already.
    """
    path.mkdir(parents=True)
    with _quiet():
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids that end a completion: of the generation config, else of the model's config,
    else the tokenizer's.
    """
    generation = getattr(model, "generation_config", None)
    for owner in (generation, model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset([ids] if isinstance(ids, int) else ids)
    return frozenset()


def _parse_config(
    config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> PreTrainedConfig:
    values = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        **config,
    }
    model_type = values.pop("model_type", None)
    with _quiet():
        try:
            defaults = AutoConfig.for_model(model_type)
        except _UNUSABLE:
            msg = (
                f"model.build.model_type = {model_type!r} is not known to transformers; use for"
                ' example "qwen3", "llama" or "gpt2"'
            )
            raise ConfigError(msg) from None
        _check_keys(values, defaults)
        try:
            parsed = AutoConfig.for_model(model_type, **values)
        except _UNUSABLE as error:
            msg = f"model.build = {dict(config)!r} is not a config: {_first_line(error)}"
            raise ConfigError(msg) from error
    if parsed.vocab_size < len(tokenizer):
        msg = (
            f"model.build.vocab_size = {parsed.vocab_size} is smaller than the tokenizer, which has"
            f" {len(tokenizer)} tokens; leave vocab_size out"
        )
        raise ConfigError(msg)
    return parsed


def _check_keys(values: Mapping[str, Any], defaults: PreTrainedConfig) -> None:
    # transformers keeps an unknown key as an attribute that nothing reads
    known = set(defaults.to_dict()) | set(defaults.attribute_map) | _LEGACY_KEYS
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "leave it out"
            msg = f"model.build.{key} is not a key of a {defaults.model_type!r} config; {hint}"
            raise ConfigError(msg)


def _check_directory(path: Path) -> None:
    if not (path / "config.json").is_file():
        raise _refusal(path, "has no config.json" if path.is_dir() else "is not a directory")


def _unusable(path: Path, error: BaseException) -> ConfigError:
    return _refusal(path, f"cannot be loaded: {_first_line(error)}")


def _refusal(path: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"model.path = {str(path)!r} {problem}; give a local directory with config.json,"
        " model.safetensors and a tokenizer, as save_pretrained writes it"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Take turns with whatever else makes modules in this process, and quietly."""
    with _BUILDING, _quiet():
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' advice and progress bars away: what matters is checked and raised."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
