"""The program that writes a policy as a GGUF file: what it writes, what it refuses, and that nothing half is left.

A policy's tokenizer in a GGUF file: llama.cpp writes text in the same tokens, or the policy is refused.
"""

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig

from protocol.errors import EngineFailed
from swarm_node.engine.llama.gguf_file import REFUSED, TEXT, find_rule, read_vocabulary, tokens_by
from swarm_node.engine.llama.weights import quieten

TOKENS = [5, 17, 300, 42, 7]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small policy of random weights, with a tokenizer of byte pairs."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=720,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=0,
    )
    made: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # transformers annotates half
    made.to(torch.float16).save_pretrained(tmp_path / "policy")
    return make_tokenizer(tmp_path / "policy", RULES["gpt-2"])


def run(folder: Path, file: Path, dtype: str = "auto", *, most_bytes: int = -1) -> tuple[int, dict[str, str]]:
    """Exit code and what it says; none of its files may be larger than so many bytes."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    command = [sys.executable, "-P", "-m", "swarm_node.engine.llama.gguf_file", str(folder), str(file), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=limit)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout or "{}")


def logits(file: Path) -> Any:
    quieten()
    llama = llama_cpp.Llama(str(file), n_ctx=64, logits_all=True, verbose=False)
    llama.eval(TOKENS)
    return torch.tensor(np.array(llama.scores[: len(TOKENS)]))


@pytest.mark.parametrize(("dtype", "nats"), [("float32", 1e-3), ("auto", 5e-3)])
def test_the_file_says_what_the_folder_says(folder: Path, tmp_path: Path, dtype: str, nats: float) -> None:
    assert run(folder, tmp_path / "out.gguf", dtype) == (0, {})
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([TOKENS])).logits[0]
    assert (logits(tmp_path / "out.gguf").log_softmax(-1) - wanted.log_softmax(-1)).abs().max() < nats


def test_an_architecture_that_is_not_converted_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "mamba2"}))
    code, said = run(folder, tmp_path / "out.gguf")
    assert (code, list(tmp_path.glob("*.gguf*"))) == (REFUSED, [])
    assert "mamba2" in said["message"]


def test_a_type_that_llama_cpp_lacks_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    code, said = run(folder, tmp_path / "out.gguf", "float64")
    assert (code, said["message"]) == (REFUSED, "A GGUF file has no weights in float64.")


def test_a_disk_that_is_full_leaves_no_part_of_a_file(folder: Path, tmp_path: Path) -> None:
    code, said = run(folder, tmp_path / "out.gguf", most_bytes=100_000)
    assert (code, list(tmp_path.glob("*.gguf*"))) == (REFUSED, [])
    assert said["message"].startswith("The GGUF file was not written:")


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_folder_that_lacks_a_file_is_refused(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).unlink()
    code, said = run(folder, tmp_path / "out.gguf")
    assert (code, list(tmp_path.glob("*.gguf*"))) == (REFUSED, [])
    assert name in said["message"]


def test_weights_that_were_cut_off_are_refused(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    code, _ = run(folder, tmp_path / "out.gguf")
    assert (code, list(tmp_path.glob("*.gguf*"))) == (REFUSED, [])


def test_a_tensor_that_llama_cpp_does_not_know_is_refused(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors") | {"model.layers.0.extra.weight": torch.zeros(2, 2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    code, said = run(folder, tmp_path / "out.gguf")
    assert (code, "extra" in said["message"]) == (REFUSED, True)


QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), BYTES])


RULES: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": split(QWEN2),
    "llama-bpe": split(LLAMA3),
}


OTHERS = (
    "They'll see 98,765 of 4321 CASES; it's\n\n  return 100%",
    "\tdef g(y):\n    y **= 33\r\n\r\n",
    "日本 1234567890 ''",
)


def make_tokenizer(folder: Path, before: Any) -> Path:
    """A small tokenizer of byte pairs, learned from the text on which rules differ."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = before
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT * 4], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    return folder


@pytest.mark.parametrize("rule", RULES)
def test_llama_cpp_writes_other_texts_in_the_same_tokens_by_the_rule_that_is_found(tmp_path: Path, rule: str) -> None:
    folder = make_tokenizer(tmp_path, RULES[rule])
    vocabulary = read_vocabulary(folder, 720)
    found, own = find_rule(folder, vocabulary), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in OTHERS:
        assert tokens_by(found, vocabulary, text) == own.encode(text, add_special_tokens=False).ids
    assert len(vocabulary.tokens) == len(vocabulary.kinds) == 720
    assert vocabulary.special.special_token_ids["eos"] == 0


def test_a_text_that_llama_splits_otherwise_is_refused(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path, split(r"[aeiou]|[^aeiou]+"))
    with pytest.raises(EngineFailed, match="no rule that splits text"):
        find_rule(folder, read_vocabulary(folder, 720))


def test_more_tokens_than_the_policy_has_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="and the policy only 300"):
        read_vocabulary(make_tokenizer(tmp_path, RULES["gpt-2"]), 300)


@pytest.mark.parametrize("model", [models.Unigram([("a", -1.0), ("b", -2.0)]), models.WordLevel({"a": 0}, "a")])
def test_tokenizers_of_another_kind_are_refused_by_name(tmp_path: Path, model: Any) -> None:
    Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(EngineFailed, match=f"of the kind {type(model).__name__}"):
        read_vocabulary(tmp_path, 10)
