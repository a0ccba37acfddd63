"""Tokenizers that amplify: each part of `tokenizers`, with parameters by which it takes as much as it can.

- `ENCODING` does its harm while a text is encoded or the file is read. A node decodes no tokens.
- A policy of this kind is the tiny one with another tokenizer.json: weights, canary and configuration are sound.
"""

import base64
import json
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Parts = dict[str, Any]

WORDS = {
    "type": "WordLevel",
    "vocab": {"[UNK]": 0, **{str(number): number for number in range(1, 64)}},
    "unk_token": "[UNK]",
}
EACH = {"Regex": "."}
LONG = "9" * 4_000_000
"""The largest text that fits many times into a tokenizer.json."""


def whole(**parts: Any) -> Parts:
    """A complete tokenizer.json with these parts."""
    plain: Parts = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": None,
        "model": WORDS,
    }
    return plain | parts


def replacing(content: str = "9999999999", pattern: Parts | None = None) -> Parts:
    return {"type": "Replace", "pattern": pattern or {"Regex": "."}, "content": content}


def normalizing(*before: Parts, times: int = 12) -> Parts:
    """One character becomes ten, again and again, behind these."""
    return whole(normalizer={"type": "Sequence", "normalizers": [*before, *[replacing()] * times]})


def behind(normalizer: Parts) -> Parts:
    """A normalizer of its own kind on a text that was made long before, again and again."""
    times = 200 if normalizer["type"] in ("NFKD", "Lowercase") else 10
    return whole(normalizer={"type": "Sequence", "normalizers": [*[replacing()] * 6, *[normalizer] * times]})


def cutting(pre_tokenizer: Parts) -> Parts:
    """A long text in as many pieces as there can be."""
    return whole(
        normalizer={"type": "Sequence", "normalizers": [replacing("9 .")] * 10},
        pre_tokenizer={"type": "Sequence", "pretokenizers": [pre_tokenizer] * 50},
    )


def backtracking(place: str) -> Parts:
    """A pattern for which the library needs exponential time, if nobody stops it."""
    pattern = {"Regex": r"((9*)*)*(?=[^9]x)|(9|99|9.)*\1y"}
    if place == "Replace":
        return whole(normalizer={"type": "Sequence", "normalizers": [*[replacing()] * 5, replacing("", pattern)]})
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    return whole(normalizer={"type": "Sequence", "normalizers": [replacing()] * 5}, pre_tokenizer=split)


def added(count: int, length: int = 1, **flags: bool) -> Parts:
    """Added tokens."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokens = [{"id": 64 + number, "content": f"{number}" + "x" * length, **plain, **flags} for number in range(count)]
    return whole(added_tokens=tokens)


def letters(count: int) -> dict[str, int]:
    return {"[UNK]": 0, **{chr(0x4E00 + number % 20_000) + str(number): number + 1 for number in range(count)}}


def bpe(**changes: Any) -> Parts:
    """One merge for each length of a run of nines, and such a run."""
    runs = ["9" * length for length in range(1, 3_000)]
    plain = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {text: number for number, text in enumerate(runs)},
        "merges": [[text, "9"] for text in runs[:-1]],
    }
    return whole(normalizer={"type": "Sequence", "normalizers": [replacing()] * 7}, model=plain | changes)


def unigram(vocab: list[Any], **changes: Any) -> Parts:
    model = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}
    return whole(normalizer={"type": "Sequence", "normalizers": [replacing()] * 7}, model=model | changes)


def charsmap(size_bytes: int) -> str:
    """Return the input of Precompiled: the length of a trie, the trie, and the texts that it leads to."""
    trie = struct.pack("<I", 0xFFFFFFFF) * (size_bytes // 4)
    return base64.b64encode(struct.pack("<I", len(trie)) + trie + b"9" * size_bytes).decode()


def template(pieces: int) -> Parts:
    every = [{"Sequence": {"id": "A", "type_id": 0}}] * pieces
    special = {"[UNK]": {"id": "[UNK]", "ids": [0] * 1_000_000, "tokens": ["[UNK]"] * 1_000_000}}
    both = [*every, {"SpecialToken": {"id": "[UNK]", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": both, "pair": both, "special_tokens": special}


def framing(post_processor: Parts) -> Parts:
    """A post-processor behind a long text."""
    return normalizing(times=6) | {"post_processor": post_processor}


def nested(kind: str, member: str, depth: int) -> str:
    """One inside of another, as text: Python's own JSON would not write it."""
    inner = f'{{"type": "{kind}", "{member}": [' * depth + "]}" * depth
    return json.dumps(whole(normalizer="HERE")).replace('"HERE"', inner)


BEHIND: dict[str, Parts] = {
    "BertNormalizer": {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": True,
        "lowercase": True,
    },
    "Strip": {"type": "Strip", "strip_left": True, "strip_right": True},
    "StripAccents": {"type": "StripAccents"},
    "NFC": {"type": "NFC"},
    "NFD": {"type": "NFD"},
    "NFKC": {"type": "NFKC"},
    "NFKD": {"type": "NFKD"},
    "Lowercase": {"type": "Lowercase"},
    "Nmt": {"type": "Nmt"},
    "ByteLevel": {"type": "ByteLevel"},
    "Prepend": {"type": "Prepend", "prepend": "9" * 100_000},
}

CUTTING: dict[str, Parts] = {
    "BertPreTokenizer": {"type": "BertPreTokenizer"},
    "ByteLevel": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "CharDelimiterSplit": {"type": "CharDelimiterSplit", "delimiter": " "},
    "Metaspace": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    "Whitespace": {"type": "Whitespace"},
    "WhitespaceSplit": {"type": "WhitespaceSplit"},
    "Split": {"type": "Split", "pattern": EACH, "behavior": "Isolated", "invert": False},
    "Punctuation": {"type": "Punctuation", "behavior": "Isolated"},
    "Digits": {"type": "Digits", "individual_digits": True},
    "UnicodeScripts": {"type": "UnicodeScripts"},
    "FixedLength": {"type": "FixedLength", "length": 1},
}

POST: dict[str, Parts] = {
    "BertProcessing": {"type": "BertProcessing", "sep": ["9" * 1_000_000, 1], "cls": ["9" * 1_000_000, 1]},
    "RobertaProcessing": {
        "type": "RobertaProcessing",
        "sep": ["9" * 1_000_000, 1],
        "cls": ["9" * 1_000_000, 1],
        "trim_offsets": True,
        "add_prefix_space": True,
    },
    "ByteLevel": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "TemplateProcessing": template(100_000),
}

ENCODING: dict[str, Callable[[], Parts | str]] = {
    "normalizer Replace": normalizing,
    "normalizer Replace of a text": lambda: normalizing(replacing(pattern={"String": "9"})),
    "normalizer Replace, backtracking": lambda: backtracking("Replace"),
    "normalizer Prepend": lambda: whole(
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": LONG}] * 10}
    ),
    "normalizer Sequence, nested": lambda: nested("Sequence", "normalizers", 200_000),
    "normalizer Precompiled": lambda: whole(
        normalizer={
            "type": "Sequence",
            "normalizers": [*[replacing()] * 6, {"type": "Precompiled", "precompiled_charsmap": charsmap(8_000_000)}],
        }
    ),
    **{f"normalizer {name}": partial(behind, part) for name, part in BEHIND.items()},
    **{f"pre-tokenizer {name}": partial(cutting, part) for name, part in CUTTING.items()},
    "pre-tokenizer Split, backtracking": lambda: backtracking("Split"),
    "pre-tokenizer Sequence, nested": lambda: nested("Sequence", "pretokenizers", 200_000).replace(
        '"normalizer"', '"pre_tokenizer"', 1
    ),
    **{f"post-processor {name}": partial(framing, part) for name, part in POST.items()},
    "post-processor Sequence": lambda: (
        normalizing(times=5) | {"post_processor": {"type": "Sequence", "processors": [POST["TemplateProcessing"]] * 2}}
    ),
    "padding to a fixed length": lambda: whole(
        padding={
            "strategy": {"Fixed": 4_000_000_000},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "[UNK]",
        }
    ),
    "truncation into many pieces": lambda: (
        normalizing(times=5)
        | {
            "truncation": {"direction": "Right", "max_length": 1_000, "strategy": "LongestFirst", "stride": 999},
            "pre_tokenizer": CUTTING["Split"],
        }
    ),
    "model BPE, long merges": bpe,
    "model BPE, byte fallback": lambda: bpe(
        byte_fallback=True, vocab={f"<0x{number:02X}>": number for number in range(256)}, merges=[]
    ),
    "model BPE, a huge vocabulary": lambda: bpe(vocab=letters(1_000_000), merges=[]),
    "model WordPiece": lambda: whole(
        normalizer={"type": "Sequence", "normalizers": [replacing()] * 7},
        model={
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "9" * 100_000,
            "max_input_chars_per_word": 2**40,
            "vocab": {"[UNK]": 0, "9": 1},
        },
    ),
    "model WordLevel, a huge vocabulary": lambda: whole(model=WORDS | {"vocab": letters(1_000_000)}),
    "model Unigram, long pieces": lambda: unigram([["9" * length, -1.0] for length in range(1, 4_000)]),
    "model Unigram, byte fallback": lambda: unigram(
        [["[UNK]", 0.0], *[[f"<0x{number:02X}>", -1.0] for number in range(256)]], byte_fallback=True
    ),
    "added tokens, many": lambda: added(300_000),
    "added tokens, long": lambda: added(8, len(LONG)),
    "added tokens, normalized": lambda: (
        normalizing(times=6) | {"added_tokens": added(16_000, normalized=True)["added_tokens"]}
    ),
    "the file itself": lambda: whole(note=LONG * 20),
}


def make_hostile(folder: Path, sound: Path, name: str) -> Path:
    """A policy folder that is sound but for its tokenizer; nothing else is copied."""
    folder.mkdir()
    for file in sound.iterdir():
        os.link(file, folder / file.name)
    (folder / "tokenizer.json").unlink()
    made = ENCODING[name]()
    (folder / "tokenizer.json").write_text(made if isinstance(made, str) else json.dumps(made, ensure_ascii=False))
    return folder
