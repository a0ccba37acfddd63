"""Sums of two two-digit numbers, checked exactly: small enough that a CPU learns them within minutes.

- A prompt reads `47+38=` and its only right answer is `85`: 8,100 problems, of which the train split draws for ever.
- The *unordered* pair decides the split, by its hash: `38+47=` is held out exactly when `47+38=` is.
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

OPERANDS = range(10, 100)
"""Two digits each, so that every prompt has one length and a digit's place tells its worth."""

COMPLETION_MAX_CHARS = 16
"""Longer completions are refused before they are looked at; the longest answer has three characters."""

_SPLITS: dict[int, Split] = {0: "held_out", 1: "validation"}
_SPLIT_BUCKETS = 16
"""One problem in sixteen is held out: about 500, on which an accuracy has a standard error of 2.2 points at most."""

_PROMPT = re.compile(r"([1-9][0-9])\+([1-9][0-9])=", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Addition; the seed orders the train split and changes nothing else."""

    seed: int = 0
    name: ClassVar[str] = "arithmetic"

    def prompt(self, index: int) -> str:
        attempt = 0
        while True:
            words = blake2b(f"{self.seed}/{index}/{attempt}".encode(), digest_size=16).digest()
            first, second = (OPERANDS[int.from_bytes(part) % len(OPERANDS)] for part in (words[:8], words[8:]))
            if split_of(first, second) == "train":
                return f"{first}+{second}="
            attempt += 1

    def validation(self) -> Problems:
        return _every_problem("validation")

    def held_out(self) -> Problems:
        return _every_problem("held_out")

    def answer(self, prompt: str) -> str:
        found = _PROMPT.fullmatch(prompt)
        if not found:
            raise MalformedMessage(f"{prompt[:40]!r} is not a prompt of this task.", hint="Prompts look like `47+38=`.")
        return str(int(found[1]) + int(found[2]))

    def reward(self, prompt: str, completion: str) -> Reward:
        if len(completion) > COMPLETION_MAX_CHARS or not _NUMBER.fullmatch(completion):
            return Reward(0.0, "invalid", {"exact": 0.0, "format": 0.0})
        exact = float(completion == self.answer(prompt))
        return Reward(exact, "ok", {"exact": exact, "format": 1.0})


def split_of(first: int, second: int) -> Split:
    """The one split that a pair may appear in, whichever way round."""
    low, high = sorted((first, second))
    digest = blake2b(f"arithmetic/{low}/{high}".encode(), digest_size=8).digest()
    return _SPLITS.get(int.from_bytes(digest) % _SPLIT_BUCKETS, "train")


@lru_cache
def _every_problem(split: Split) -> Problems:
    return tuple(
        (f"{first}+{second}=", str(first + second))
        for first in OPERANDS
        for second in OPERANDS
        if split_of(first, second) == split
    )
