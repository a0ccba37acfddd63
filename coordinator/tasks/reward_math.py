"""The built-in reward `math`: is what stands in the last \\boxed{} the same, mathematically, as the gold answer?

- Math-Verify parses and compares; its own timeouts are off, since they need signals that a hang in C never sees.
  Whoever runs this must be killable: some answers of ten characters take longer than the universe has.
- The gold answer goes first: comparing is not symmetric.
- Gold answers may be plain, boxed, or as GSM8K has them, behind `####`. One that says nothing is the data's fault.
"""

import logging
from functools import lru_cache
from typing import Any

from protocol.errors import ConfigInvalid
from protocol.tasks import Problem, Reward

try:
    import math_verify
except ModuleNotFoundError as missing:
    raise ConfigInvalid(f"Task math needs Math-Verify ({missing}).", hint="pip install 'echo-swarm[math]'") from None

ANSWER_MAX_CHARS = 20_000
"""The end of a completion is what counts, and parsing gets slow with length."""

_HOW = (math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig())

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that nobody but us bounds its time


def reward(problem: Problem, completion: str) -> Reward:
    gold = golds(problem.answer)
    said = _parse(_last_box(completion[-ANSWER_MAX_CHARS:]))
    if not said:
        return Reward(0.0, "invalid")
    return Reward(float(math_verify.verify(list(gold), said, timeout_seconds=None)), "ok")


@lru_cache(maxsize=1024)
def golds(answer: str) -> tuple[Any, ...]:
    """What a gold answer says."""
    text = answer.rpartition("####")[2].strip()
    if "\\boxed" not in text:
        text = f"\\boxed{{{text.strip('$')}}}"
    found = _parse(text)
    if not found:
        raise ConfigInvalid(f"The answer {answer[:60]!r} says nothing in mathematics.")
    return tuple(found)


def _last_box(text: str) -> str:
    """From the last box on, or all of it where there is none: of several boxes the library takes them all for one."""
    return text[max(0, text.rfind("\\boxed")) :]


def _parse(text: str) -> list[Any]:
    found: list[Any] = math_verify.parse(text, extraction_config=list(_HOW), parsing_timeout=None)
    return found
