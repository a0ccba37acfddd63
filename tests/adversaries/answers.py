"""Code in an answer: the right sum as no task may read it, and what a careless reader would compute, run or skip."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from coordinator.learner.embedded_text import PAD, START
from protocol.tasks.arithmetic import answer_to
from protocol.work.lease import Lease
from tests.adversaries.forging import Canned
from tests.adversaries.nodes import Samples

if TYPE_CHECKING:
    from tests.adversaries.arena import Arena


def in_digits_from(zero: str) -> Callable[[int], str]:
    """The number in other digits than ours, of which this is the least."""
    return lambda number: "".join(chr(ord(zero) + int(digit)) for digit in str(number))


SPELLINGS: dict[str, Callable[[int], str]] = {
    "a formula": lambda number: f"{number - 1}+1",
    "a power": lambda number: "9**9",
    "a call": lambda number: f"int({number})",
    "a comment": lambda number: f"{number}#",
    "an import": lambda number: "__import__('os')",
    "a list": lambda number: f"[{number}]",
    "two answers": lambda number: f"{number},{number + 1}",
    "an answer in tags": lambda number: f"<answer>{number}</answer>",
    "a sign": lambda number: f"+{number}",
    "a zero before": lambda number: f"0{number}",
    "a fraction": lambda number: f"{number}.",
    "an exponent": lambda number: f"{number}e0",
    "hexadecimal": hex,
    "an underscore": lambda number: f"{number // 10}_{number % 10}",
    "a space before": lambda number: f" {number}",
    "a line's end": lambda number: f"{number}\n",
    "a NUL": lambda number: f"{number}\0",
    "a special token before": lambda number: f"{START}{number}",
    "a special token after": lambda number: f"{number}{PAD}",
    "Arabic digits": in_digits_from("٠"),
    "wide digits": in_digits_from("０"),
    "superscript digits": lambda number: str(number).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")),
    "not a number": lambda number: "NaN",
    "endless": lambda number: "inf",
    "as large as there is room": lambda number: "9" * 10_000,
}
"""Other spellings of an answer, as far as there is room in a completion."""


class Speller(Canned):
    """Says every sample of a group in another way."""

    attack = f"code in an answer: {len(SPELLINGS)} readings of the right one, prefilled"

    def __init__(self, arena: "Arena", number: int) -> None:
        super().__init__(arena, number)
        self.said = 0
        self.rewarded: list[str] = []
        """Spellings that the task took for the answer."""

    def forge(self, lease: Lease, said: Samples) -> Samples:
        arena, right = self.arena, int(answer_to(self.arena.question(lease)))
        names = [list(SPELLINGS)[(self.said + place) % len(SPELLINGS)] for place in range(lease.samples)]
        self.said += lease.samples
        made = arena.prefilled(lease, [self.spoken(SPELLINGS[name](right)) for name in names])
        self.rewarded += [name for name, reward in zip(names, arena.rewards(lease, made), strict=True) if reward > 0]
        return made
