"""Sums of two numbers, checked exactly: small enough that a CPU learns them within minutes.

- A problem is a pair of numbers of up to `DIGITS` digits; its prompt reads `47+385=` and its only right answer `432`.
- The *unordered* pair decides the split, by its hash: `385+47=` is held out exactly when `47+385=` is.
- Nothing but the plain decimal form is accepted: ASCII digits, no sign, no leading zero, no white space.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import ClassVar, Literal

from protocol.errors import MalformedMessage
from protocol.tasks.interface import Reward

Split = Literal["train", "validation", "held_out"]
Problems = tuple[tuple[str, str], ...]

DIGITS = 3
"""Digits of an operand at most."""

COMPLETION_MAX_CHARS = 16
"""Longer completions are refused before they are looked at; the longest answer has `DIGITS` + 1 characters."""

HELD_OUT_ITEMS = 512
"""Two standard errors of an accuracy on so many problems are at most 4.4 points."""

VALIDATION_ITEMS = 256

_SPLITS: dict[int, Split] = {0: "held_out", 1: "validation"}
_SPLIT_BUCKETS = 32
_PROMPT = re.compile(rf"(0|[1-9][0-9]{{0,{DIGITS - 1}}})\+(0|[1-9][0-9]{{0,{DIGITS - 1}}})=", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Addition; the seed orders the train split and changes nothing else."""

    seed: int = 0
    name: ClassVar[str] = "arithmetic"

    def prompt(self, index: int) -> str:
        return _problem(f"train/{self.seed}/{index}", "train")

    def validation(self) -> Problems:
        return _fixed("validation", VALIDATION_ITEMS)

    def held_out(self) -> Problems:
        return _fixed("held_out", HELD_OUT_ITEMS)

    def answer(self, prompt: str) -> str:
        return _answer(prompt)

    def reward(self, prompt: str, completion: str) -> Reward:
        if len(completion) > COMPLETION_MAX_CHARS or not _NUMBER.fullmatch(completion):
            return Reward(0.0, "invalid", {"exact": 0.0, "format": 0.0})
        exact = float(completion == _answer(prompt))
        return Reward(exact, "ok", {"exact": exact, "format": 1.0})


def split_of(first: int, second: int) -> Split:
    """The one split that a pair may appear in, whichever way round."""
    low, high = sorted((first, second))
    digest = blake2b(f"arithmetic/{low}/{high}".encode(), digest_size=8).digest()
    return _SPLITS.get(int.from_bytes(digest) % _SPLIT_BUCKETS, "train")


def _answer(prompt: str) -> str:
    found = _PROMPT.fullmatch(prompt)
    if not found:
        raise MalformedMessage(f"{prompt[:40]!r} is not a prompt of this task.", hint="Prompts look like `47+385=`.")
    return str(int(found[1]) + int(found[2]))


def _problem(name: str, split: Split) -> str:
    """The prompt that a name stands for: hashes of the name are operand pairs until one lies in the split."""
    attempt = 0
    while True:
        words = blake2b(f"{name}/{attempt}".encode(), digest_size=16).digest()
        first, second = (int.from_bytes(part) % 10**DIGITS for part in (words[:8], words[8:]))
        if split_of(first, second) == split:
            return f"{first}+{second}="
        attempt += 1


@lru_cache
def _fixed(split: Split, count: int) -> Problems:
    """The first `count` different problems of a fixed split."""
    prompts: dict[str, str] = {}
    index = 0
    while len(prompts) < count:
        prompt = _problem(f"{split}/{index}", split)
        prompts[prompt] = _answer(prompt)
        index += 1
    return tuple(prompts.items())
