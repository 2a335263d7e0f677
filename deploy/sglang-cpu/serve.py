"""A real SGLang server on a CPU, from unmodified packages: `python serve.py --model-path DIR ...`.

Consumes the arguments of `sglang.launch_server`, with defaults that suit a small model on a CPU.
Produces the server. For tests and first steps; docs/sglang.md says what a CPU cannot show.

SGLang starts its processes with multiprocessing's "spawn", which imports this file again in each of
them: what makes the imports work is at the top level, and so holds in all of them. Three things are
in the way of SGLang beside a CPU build of torch, and none is needed to serve text:

- torchvision, which it imports, has operators that do not load there, and fails for want of their
  schemas;
- sgl_kernel is built for GPUs, and a few of its names are imported, for speculative decoding;
- LoRA asks for pinned memory, which needs a GPU.
"""

from __future__ import annotations

import functools
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # read when sglang is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

DEFAULTS = (
    ("--device", "cpu"),
    ("--attention-backend", "torch_native"),
    # of the machine's memory, what others take of it meanwhile included; the tokens are the limit
    ("--mem-fraction-static", "0.8"),
    ("--max-total-tokens", "65536"),
    ("--sleep-on-idle",),  # else an idle server takes a third of a core
)
KERNELS = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
PINNED = ("arange", "empty", "full", "ones", "tensor", "zeros")


def declare_vision_operators() -> torch.library.Library:
    """Return what keeps the schemas declared; torchvision may find them there already."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def stand_in_for_kernels() -> None:
    """Put names in the place of the kernels; whoever calls one of them is told."""
    module = types.ModuleType("sgl_kernel")
    for name in KERNELS:
        setattr(module, name, functools.partial(_absent, name))
    sys.modules["sgl_kernel"] = module


def _absent(name: str, *_args: object, **_kwargs: object) -> NoReturn:
    raise NotImplementedError(f"sgl_kernel.{name} is not in a CPU environment")


def allow_pinned_memory() -> None:
    """Give ordinary memory to whoever asks for pinned memory."""
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self
    for name in PINNED:
        setattr(torch, name, _without_pinning(getattr(torch, name)))


def _without_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return made


def with_defaults(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with those of `DEFAULTS` that are not among them."""
    given = {argument.split("=")[0] for argument in arguments}
    return [*(word for words in DEFAULTS if words[0] not in given for word in words), *arguments]


VISION = declare_vision_operators()
try:
    import sgl_kernel  # noqa: F401
except ImportError:
    stand_in_for_kernels()
if not torch.cuda.is_available():
    allow_pinned_memory()


def main() -> None:
    """Serve until a signal comes."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(with_defaults(sys.argv[1:])))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
