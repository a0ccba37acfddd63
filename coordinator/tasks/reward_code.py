"""The built-in reward `code`: the program in a completion's last ```python block against the tests of the problem.

The column `tests` has one of these forms, as such or as JSON:

    ["assert f(1) == 2", …]                               lines that run in the names of the program
    [{"stdin": "1\\n", "stdout": "2\\n"}, …]              also "input" and "output"; a run of the program for each
    {"inputs": ["1\\n", …], "outputs": ["2\\n", …]}       the same, as in APPS and TACO
    "def check(f): …"                                     one text, which is one test

- The score is 1 if all tests pass, or the share that passes (`SWARM_CODE_SCORE=share`). Without a block the completion
  is `invalid`.
- Outputs are compared line by line, without white space at the ends of lines and of the text.
- The completions of a group run `SWARM_CODE_PARALLEL` at a time. After a time limit the tests left over count as
  failed, so that a group takes about `SWARM_CODE_TIMEOUT_S` × G / parallel at most; keep `reward.timeout_s` above it.
- A program shares its process with asserts, and can be written to fool them. Outputs are compared in this process: a
  program never sees those that are expected.
"""

import asyncio
import json
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, Field

from coordinator.environments.python_tool import SnippetLimits, run_snippet
from coordinator.tasks.reward_settings import from_environment
from protocol.errors import ConfigInvalid
from protocol.tasks import Reward

PREFIX = "SWARM_CODE_"
LANGUAGES = ("python", "python3", "py")


class CodeSettings(BaseModel):
    """The settings of the reward, each a variable such as SWARM_CODE_SCORE."""

    score: Literal["all", "share"] = "all"
    timeout_s: float = Field(4.0, gt=0, le=600)
    """The limits of each run of a program."""
    memory_mib: int = Field(1024, ge=64)
    output_bytes: int = Field(1_000_000, ge=1024)
    parallel: int = Field(4, ge=1, le=64)


class Example(NamedTuple):
    """An input of a program and the output that is expected."""

    stdin: str
    stdout: str


class CodeTests(NamedTuple):
    """The tests of a problem: lines that run after the program, or runs of it."""

    lines: tuple[str, ...] = ()
    examples: tuple[Example, ...] = ()


async def reward(completions: Sequence[Any], tests: Sequence[Any] = ()) -> list[Reward]:
    settings = from_environment(CodeSettings, PREFIX, os.environ)
    if not tests:
        raise ConfigInvalid("The problem has no tests.", hint="Reward `code` needs a column `tests` in the data.")
    wanted = read_tests(tests[0])
    free = asyncio.Semaphore(settings.parallel)

    async def judged(completion: Any) -> Reward:
        async with free:
            return await judge(_text(completion), wanted, settings)

    return list(await asyncio.gather(*map(judged, completions)))


async def judge(completion: str, tests: CodeTests, settings: CodeSettings) -> Reward:
    """Return the reward of one completion."""
    code = last_block(completion)
    if code is None:
        return Reward(0.0, "invalid", {"passed": 0.0})
    limits = SnippetLimits(
        wall_s=settings.timeout_s,
        cpu_s=int(settings.timeout_s) + 1,
        memory_mib=settings.memory_mib,
        output_bytes=settings.output_bytes,
    )
    count = len(tests.lines) + len(tests.examples)
    passed = (await run_snippet(code, checks=tests.lines, limits=limits)).passed if tests.lines else 0
    for example in tests.examples:
        result = await run_snippet(code, stdin=example.stdin, limits=limits)
        right = result.status == "ok" and _lines(result.stdout) == _lines(example.stdout)
        passed += right
        if result.status == "timeout" or (not right and settings.score == "all"):
            break
    share = passed / count
    return Reward(share if settings.score == "share" else float(passed == count), "ok", {"passed": share})


def last_block(text: str) -> str | None:
    """Return the last block that is fenced as Python and has an end; None if there is none."""
    found, block = None, None
    for line in text.splitlines():
        mark = line.strip()
        if block is not None and mark == "```":
            found = found if block is _OTHER else "\n".join(block)
            block = None
        elif block is not None:
            block.append(line) if block is not _OTHER else None
        elif mark.startswith("```"):
            block = [] if mark.removeprefix("```").strip().lower() in LANGUAGES else _OTHER
    return found


_OTHER: list[str] = ["a block of another language"]


def read_tests(column: Any) -> CodeTests:
    """Return the tests in a column; raise an error if it has none of the forms."""
    value = column
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = [column] if str(column).strip() else None
    if isinstance(value, dict) and isinstance(value.get("inputs"), list) and isinstance(value.get("outputs"), list):
        if len(value["inputs"]) != len(value["outputs"]):
            raise _unreadable(column)
        value = [{"stdin": i, "stdout": o} for i, o in zip(value["inputs"], value["outputs"], strict=True)]
    if not isinstance(value, list) or not value:
        raise _unreadable(column)
    if all(isinstance(each, str) for each in value):
        return CodeTests(lines=tuple(value))
    examples = [example for each in value if (example := _example(each))]
    if len(examples) < len(value):
        raise _unreadable(column)
    return CodeTests(examples=tuple(examples))


def _example(value: Any) -> Example | None:
    if not isinstance(value, dict):
        return None
    for names in (("stdin", "stdout"), ("input", "output")):
        stdin, stdout = (value.get(name) for name in names)
        if isinstance(stdin, str) and isinstance(stdout, str):
            return Example(stdin, stdout)
    return None


def _unreadable(column: Any) -> ConfigInvalid:
    return ConfigInvalid(
        f"The column tests cannot be read: {str(column)[:60]!r}.",
        hint='Use a list of lines such as "assert f(1) == 2", or of {"stdin": "…", "stdout": "…"}.',
    )


def _text(completion: Any) -> str:
    """Return the text of a completion, which is a list of one message if the prompt is a chat."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
