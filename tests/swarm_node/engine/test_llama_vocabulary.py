"""A policy's tokenizer in a GGUF file: llama.cpp writes text in the same tokens, or the policy is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from protocol.errors import EngineFailed
from swarm_node.engine.llama.gguf_file import TEXT, find_rule, read_vocabulary, tokens_by

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
