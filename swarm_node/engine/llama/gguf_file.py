"""Program that converts a policy folder with its tokenizer to a GGUF file; the coordinator runs it.

    python -P -m swarm_node.engine.llama.gguf_file FOLDER FILE.gguf auto|float32|float16|bfloat16|q8_0

- It uses the engine's recipes and checks: an architecture that the engine does not support is refused.
- The file appears complete or not at all.
- For a refused policy the exit code is `REFUSED`, and the reason is JSON on standard output.
- Of a tokenizer, the file has the tokens, the merges of pairs, and the rule that splits text first. Tokenizers that
  merge pairs of bytes (byte-level BPE) are written; others are refused by name.
- llama.cpp has a fixed list of named splitting rules. The chosen rule gives the same tokens as the policy's own
  tokenizer on a text where the rules differ; if there is none, the policy is refused.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
from gguf import TokenType
from tokenizers import Tokenizer

from protocol.errors import EngineFailed, SwarmError
from swarm_node.engine.llama import weights
from swarm_node.engine.llama.engine import TYPES
from swarm_node.engine.llama.ggml import Type
from swarm_node.engine.llama.recipes import recipe_of
from swarm_node.engine.llama.weights import quieten
from swarm_node.engine.policy_files import read_config

RULES = (
    "qwen2", "llama-bpe", "smollm", "gpt-2", "gpt-4o", "tekken", "deepseek-llm", "deepseek-coder", "deepseek-v3",
    "deepseek-r1-qwen", "olmo", "dbrx", "stablelm2", "smaug-bpe", "starcoder", "refact", "command-r", "falcon", "mpt",
    "bloom", "gpt3-finnish", "phi-2", "poro-chat", "viking", "glm4", "glm5", "chatglm-bpe", "exaone", "exaone4",
    "hunyuan", "seed-coder", "codeshell", "jais", "minerva-7b", "megrez", "trillion", "superbpe", "kimi-k2", "qwen35",
)  # fmt: skip  # names of llama.cpp, the most frequent first

TEXT = (
    "It's 7, 12, 345, 6789 and 1234567.89; WE'LL see: 3.14e-10!?\n\n\n \t \n   def f(x):\n\t\treturn x**2  # 99%...\r\n"
    "camelCase HTTPServer don't DON'T naïve Ærøskøbing \u0301e 中文字符 日本語テキスト 한국어 "
    "ру́сский العربية ١٢٣ ภาษาไทย हिन्दी १२३ "
    "🚀🚀 👩\u200d👩\u200d👧 ∑∫≠ ''''``\"\" ----- ======= /usr/local/bin <tag attr='1'/> a  b   c    d \u00a0\u2003x  "
)
"""A text that the rules split differently."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a policy and their kinds, one for each row of its output."""

    tokens: list[str]
    kinds: list[TokenType]
    special: gguf.SpecialVocab

    def write(self, writer: gguf.GGUFWriter, rule: str) -> None:
        """Add the vocabulary to a file, with the splitting rule `rule`."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        self.special.add_to_gguf(writer, quiet=True)


def read_vocabulary(folder: Path, rows: int) -> Vocabulary:
    """Read the tokenizer of a policy with `rows` output rows; rows without a token are marked unused."""
    described = json.loads((folder / "tokenizer.json").read_bytes())
    _require_byte_pairs(described)
    names = dict(described["model"]["vocab"])
    added = {token["id"]: token for token in described["added_tokens"]}
    names |= {token["content"]: number for number, token in added.items()}
    by_number = {number: name for name, number in names.items()}
    if max(by_number) >= rows:
        raise EngineFailed(f"The tokenizer has a token {max(by_number)}, and the policy only {rows}.")
    tokens = [by_number.get(number, f"[PAD{number}]") for number in range(rows)]
    kinds = [_kind(number, by_number, added) for number in range(rows)]
    return Vocabulary(tokens, kinds, gguf.SpecialVocab(folder, load_merges=True, n_vocab=rows))


def find_rule(folder: Path, vocabulary: Vocabulary) -> str:
    """Return the name of llama.cpp's splitting rule that gives the same tokens as the policy's own tokenizer."""
    quieten()  # it logs a lot for each vocabulary that it loads
    wanted = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    for rule in RULES:
        if tokens_by(rule, vocabulary, TEXT) == wanted:
            return rule
    raise EngineFailed(
        "llama.cpp has no rule that splits text as this policy's tokenizer does.",
        hint="Export the policy as a folder: llama.cpp's own converter may know its tokenizer.",
    )


def tokens_by(rule: str, vocabulary: Vocabulary, text: str) -> list[int]:
    """Return llama.cpp's tokens of a text by `rule`; empty if it does not support the rule."""
    with tempfile.TemporaryDirectory(prefix="echo-swarm-") as scratch:
        file = Path(scratch) / "vocabulary.gguf"
        writer = gguf.GGUFWriter(file, "llama")
        vocabulary.write(writer, rule)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(bytes(file), parameters)
    if not model:
        return []
    try:
        return _tokenize(model, text.encode())
    finally:
        llama_cpp.llama_model_free(model)


def _kind(number: int, by_number: dict[int, str], added: dict[int, Any]) -> TokenType:
    if number not in by_number:
        return TokenType.UNUSED
    if number not in added:
        return TokenType.NORMAL
    return TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED


def _require_byte_pairs(described: dict[str, Any]) -> None:
    model = described["model"]
    kind = str(model.get("type"))
    if kind == "BPE" and not model.get("byte_fallback") and "ByteLevel" in set(_types(described.get("decoder"))):
        return
    raise EngineFailed(
        f"A tokenizer of the kind {kind} that does not merge pairs of bytes cannot be written to a GGUF file.",
        hint="Export the policy as a folder: llama.cpp's own converter may know its tokenizer.",
    )


def _types(described: Any) -> Iterator[str]:
    """Yield the types of a part of tokenizer.json and of its nested parts."""
    if isinstance(described, dict):
        yield str(described.get("type"))
        for part in (item for value in described.values() if isinstance(value, list) for item in value):
            yield from _types(part)


def _tokenize(model: Any, text: bytes) -> list[int]:
    room = (llama_cpp.llama_token * (len(text) + 1))()
    count = llama_cpp.llama_tokenize(
        llama_cpp.llama_model_get_vocab(model), text, len(text), room, len(room), False, False
    )
    return list(room[: max(0, count)])


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
