"""A policy folder without weights to speak of: what the coordinator itself reads, and something to cut into chunks."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, END = "<|endoftext|>", "<|im_end|>"
VOCABULARY = {text: number for number, text in enumerate([PAD, END, *"0123456789+="])}
END_TOKEN = VOCABULARY[END]


def tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per character."""
    made = Tokenizer(models.WordLevel(VOCABULARY, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([PAD, END])
    return made


def policy_files(weights: bytes = b"weights") -> dict[str, bytes]:
    return {
        "config.json": json.dumps({"vocab_size": len(VOCABULARY), "eos_token_id": END_TOKEN}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": END_TOKEN}).encode(),
        "model.safetensors": weights,
        "tokenizer.json": tokenizer().to_str().encode(),
    }


def write_policy(folder: Path, weights: bytes = b"weights") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in policy_files(weights).items():
        (folder / name).write_bytes(data)


def encode(text: str) -> list[int]:
    return [VOCABULARY[character] for character in text]
