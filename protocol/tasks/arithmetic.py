"""Sums of two two-digit numbers, checked exactly: small enough that a CPU learns them within minutes.

- A prompt is `47+38=` and its only right answer is `85`. Two thirds of the problems need a carry, which is the hard
  part: operands that end in 0 or 1, which hardly ever carry, are left out.
- The *unordered* pair decides the split, by its hash: `38+47=` is held out exactly when `47+38=` is.
- Only the plain decimal form is accepted: ASCII digits, no sign, no leading zero, no white space.
- The corpus to imitate comes from a teacher who mostly forgets the carry. A policy that imitates it makes the same
  mistake and can unlearn it only by its rewards.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import ClassVar, Literal

from protocol.errors import MalformedMessage
from protocol.tasks.interface import Problem, Prompt, Reward, Split

OPERANDS = tuple(number for number in range(10, 100) if number % 10 >= 2)
"""Two digits each, so that all prompts have the same length and the place of a digit determines its value."""

FORGETTING = 0.8
"""Share of the sums with a carry in which the teacher forgets it, so that greedy decoding forgets it, too."""

COMPLETION_MAX_CHARS = 16
"""Longer completions are rejected before they are parsed; the longest answer has three characters."""

_SPLITS: dict[int, Split] = {0: "held_out", 1: "validation"}
_SPLIT_BUCKETS = 10
"""One problem in ten is held out: about 500, on which an accuracy has a standard error of 2.2 points at most."""

_PROMPT = re.compile(r"([1-9][0-9])\+([1-9][0-9])=", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Sums of two two-digit numbers; the seed orders the train split and changes nothing else."""

    seed: int = 0
    name: ClassVar[str] = "arithmetic"
    exact: ClassVar[Literal[True]] = True

    def problem(self, index: int) -> Problem:
        attempt = 0
        while True:
            words = _words(f"{self.seed}/{index}/{attempt}")
            first, second = (OPERANDS[word % len(OPERANDS)] for word in words)
            if split_of(first, second) == "train":
                return _problem(first, second)
            attempt += 1

    def problems(self, split: Literal["validation", "held_out"]) -> tuple[Problem, ...]:
        return _every_problem(split)

    def demonstration(self, index: int) -> Problem:
        problem = self.problem(index)
        chance, _ = _words(f"{self.seed}/{index}/teacher")
        forgets = chance < FORGETTING * 2**64
        return Problem(problem.prompt, _without_carry(problem.prompt)) if forgets else problem

    def demonstrated(self, problem: Problem) -> frozenset[str]:
        return frozenset((answer_to(problem.prompt), _without_carry(problem.prompt)))

    def reward(self, problem: Problem, completion: str) -> Reward:
        if len(completion) > COMPLETION_MAX_CHARS or not _NUMBER.fullmatch(completion):
            return Reward(0.0, "invalid", {"exact": 0.0, "format": 0.0})
        exact = float(completion == answer_to(problem.prompt))
        return Reward(exact, "ok", {"exact": exact, "format": 1.0})


def split_of(first: int, second: int) -> Split:
    """Return the only split in which a pair may occur, in either order."""
    low, high = sorted((first, second))
    digest = blake2b(f"arithmetic/{low}/{high}".encode(), digest_size=8).digest()
    return _SPLITS.get(int.from_bytes(digest) % _SPLIT_BUCKETS, "train")


def answer_to(prompt: Prompt) -> str:
    """Return the only right completion."""
    return str(sum(_operands(prompt)))


def _problem(first: int, second: int) -> Problem:
    return Problem(f"{first}+{second}=", str(first + second))


def _operands(prompt: Prompt) -> tuple[int, int]:
    match = _PROMPT.fullmatch(prompt) if isinstance(prompt, str) else None
    if not match:
        raise MalformedMessage(f"{prompt[:40]!r} is not a prompt of this task.", hint="Prompts look like `47+38=`.")
    return int(match[1]), int(match[2])


def _without_carry(prompt: Prompt) -> str:
    """Return the sum without the carry of the ones digits; it is the right answer if they carry nothing."""
    first, second = _operands(prompt)
    carry = (first % 10 + second % 10) // 10
    return str(first + second - 10 * carry)


def _words(name: str) -> tuple[int, int]:
    """Return two numbers below 2^64 that follow from a name."""
    digest = blake2b(name.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8]), int.from_bytes(digest[8:])


@lru_cache
def _every_problem(split: Split) -> tuple[Problem, ...]:
    return tuple(
        _problem(first, second) for first in OPERANDS for second in OPERANDS if split_of(first, second) == split
    )
