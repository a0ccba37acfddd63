"""The built-in reward `math`: 1 if the content of the last \\boxed{} equals the gold answer mathematically.

- Math-Verify parses and compares; its own timeouts are off, since they need signals that a hang in C never handles.
  The process must be killable: some answers of ten characters would practically never finish.
- The gold answer is the first argument: the comparison is not symmetric.
- Gold answers may be plain, boxed, or behind `####` as in GSM8K. One that cannot be parsed is an error of the data.
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
"""The end of a completion that is parsed: parsing is slow for long texts."""

_HOW = (math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig())

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its timeouts are off


def reward(problem: Problem, completion: str) -> Reward:
    gold = golds(problem.answer)
    said = _parse(_last_box(completion[-ANSWER_MAX_CHARS:]))
    if not said:
        return Reward(0.0, "invalid")
    return Reward(float(math_verify.verify(list(gold), said, timeout_seconds=None)), "ok")


@lru_cache(maxsize=1024)
def golds(answer: str) -> tuple[Any, ...]:
    """Return the parsed values of a gold answer."""
    text = answer.rpartition("####")[2].strip()
    if "\\boxed" not in text:
        text = f"\\boxed{{{text.strip('$')}}}"
    parsed = _parse(text)
    if not parsed:
        raise ConfigInvalid(f"The answer {answer[:60]!r} cannot be parsed as mathematics.")
    return tuple(parsed)


def _last_box(text: str) -> str:
    """Return the text from the last box on, or all of it: the library would read several boxes as one answer."""
    return text[max(0, text.rfind("\\boxed")) :]


def _parse(text: str) -> list[Any]:
    parsed: list[Any] = math_verify.parse(text, extraction_config=list(_HOW), parsing_timeout=None)
    return parsed
