"""What a server must be before a run uses it.

Consumes what a server says of itself; produces what the engine has to know of it, or a
`ConfigError`. Pure; waits for nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ratchet.errors import ConfigError

FLOOR: Final = (0, 5, 23)
"""The oldest SGLang that is used, and the one that all was tried with."""
_HOLES: Final = (
    "before 0.5.22 anybody who reaches it runs code in it, key or not (CVE-2026-15969,"
    " https://github.com/advisories/GHSA-359v-m36h-r94v; CVE-2026-3059 and CVE-2026-3060,"
    " https://kb.cert.org/vuls/id/665416; CVE-2025-10164), and before 0.5.23 its ranks on several"
    " hosts take messages of strangers (CVE-2026-93034)"
)
_KEPT_TOKENS: Final = 6
"""Of its context, or of its cache, that a server allows no prompt to use."""


def check_server(
    url: str, facts: Mapping[str, Any], *, model: Path, dtype: str, lora: bool
) -> tuple[int, int]:
    """Return (tensor-parallel ranks, tokens of its context or of its cache if that is smaller).

    Args:
        url: of the server, for errors.
        facts: its /server_info and /model_info together.
        model: directory of the model of the run.
        dtype: of its weights.
        lora: whether adapters will be loaded.

    Raises:
        ConfigError: what is wrong, and the way out.
    """
    for problem in (
        _version_problem(str(facts.get("version"))),
        _model_problem(facts, model),
        _dtype_problem(facts, dtype),
        _layout_problem(facts),
        _feature_problem(facts, lora=lora),
    ):
        if problem is not None:
            raise ConfigError(f"the SGLang server at {url} {problem}")
    return _count(url, facts, "tp_size"), _count(url, facts, "max_req_input_len") + _KEPT_TOKENS


def _count(url: str, facts: Mapping[str, Any], name: str) -> int:
    value = facts.get(name)
    if isinstance(value, int):
        return value
    msg = (
        f"the SGLang server at {url} says {name} = {value!r} in /server_info, where a number is"
        " needed; is something in front of it, or is it a version that is not known yet?"
    )
    raise ConfigError(msg)


def _version_problem(version: str) -> str | None:
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if found is not None and tuple(map(int, found.groups())) >= FLOOR:
        return None
    floor = ".".join(map(str, FLOOR))
    return f"is version {version}, and known holes are open in it: {_HOLES}; use {floor} or newer"


def _model_problem(facts: Mapping[str, Any], model: Path) -> str | None:
    ours = json.loads((model / "config.json").read_text(encoding="utf-8")).get("architectures")
    theirs = facts.get("architectures")
    if theirs == ours:
        return None
    return (
        f"serves {facts.get('model_path')!r}, of architecture {theirs}, and the run trains"
        f" {str(model)!r}, of {ours}; start it with the run's model"
    )


def _dtype_problem(facts: Mapping[str, Any], dtype: str) -> str | None:
    if facts.get("dtype") == dtype:
        return None
    return (
        f"computes in {facts.get('dtype')!r}, and model.dtype is {dtype!r}; start it with --dtype"
        f' {dtype} ("auto" serves float32 as float16)'
    )


def _layout_problem(facts: Mapping[str, Any]) -> str | None:
    for name in ("dp_size", "pp_size", "nnodes"):
        if facts.get(name, 1) != 1:
            return (
                f"has {name} = {facts[name]}: weights are sent to the tensor-parallel ranks of one"
                " host; start one server for each replica, behind a router"
            )
    if facts.get("disaggregation_mode", "null") != "null":
        return "is half of a disaggregated pair: start it without --disaggregation-mode"
    return None


def _feature_problem(facts: Mapping[str, Any], *, lora: bool) -> str | None:
    if facts.get("enable_custom_logit_processor"):
        return (
            "runs code that a request brings (CVE-2026-7304); start it without"
            " --enable-custom-logit-processor"
        )
    if facts.get("tokenizer_worker_num", 1) != 1:
        return "asks for no key with several tokenizer workers; start it with one"
    if lora and not facts.get("enable_lora"):
        return "takes no adapters; start it with --enable-lora, --max-lora-rank and targets"
    return None
