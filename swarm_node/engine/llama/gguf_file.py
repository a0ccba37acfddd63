"""Program that converts a policy folder with its tokenizer to a GGUF file; the coordinator runs it.

    python -P -m swarm_node.engine.llama.gguf_file FOLDER FILE.gguf auto|float32|float16|bfloat16|q8_0

- It uses the engine's recipes and checks: an architecture that the engine does not support is refused.
- The file appears complete or not at all.
- For a refused policy the exit code is `REFUSED`, and the reason is JSON on standard output.
"""

import json
import logging
import sys
from functools import partial
from pathlib import Path

import gguf

from protocol.errors import EngineFailed, SwarmError
from swarm_node.engine.llama import weights
from swarm_node.engine.llama.engine import TYPES
from swarm_node.engine.llama.ggml import Type
from swarm_node.engine.llama.recipes import recipe_of
from swarm_node.engine.llama.vocabulary import Vocabulary, find_rule, read_vocabulary
from swarm_node.engine.policy_files import read_config

REFUSED = 2

_FILE_TYPES = {
    Type.F32: gguf.LlamaFileType.ALL_F32,
    Type.F16: gguf.LlamaFileType.MOSTLY_F16,
    Type.BF16: gguf.LlamaFileType.MOSTLY_BF16,
    Type.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
}


def write(folder: Path, file: Path, dtype: str) -> None:
    """Write a policy's weights in `dtype` (`auto`: the folder's type), and its tokenizer."""
    values = read_config(folder)
    recipe, config = recipe_of(values)
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32") if dtype == "auto" else dtype
    if name not in TYPES:
        raise EngineFailed(f"A GGUF file has no weights in {name}.", hint=f"Choose one of {', '.join(TYPES)}.")
    kind = TYPES[name]
    given = weights.sources(folder)
    wanted = weights.places(recipe, config, kind, given)
    vocabulary = read_vocabulary(folder, config.vocabulary)
    about = partial(_describe, kind=kind, vocabulary=vocabulary, rule=find_rule(folder, vocabulary))
    beside = file.with_name(f"{file.name}.partial")
    try:
        weights.write_gguf(beside, recipe, config, wanted, given, about)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def _describe(writer: gguf.GGUFWriter, *, kind: Type, vocabulary: Vocabulary, rule: str) -> None:
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    vocabulary.write(writer, rule)


def main() -> int:
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    folder, file, dtype = sys.argv[1:]
    try:
        write(Path(folder), Path(file), dtype)
    except (SwarmError, OSError, ValueError) as error:
        hint = error.hint if isinstance(error, SwarmError) else ""
        message = error.message if isinstance(error, SwarmError) else f"The GGUF file was not written: {error}."
        print(json.dumps({"message": message, "hint": hint}))
        return REFUSED
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
