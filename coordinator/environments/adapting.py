"""The parts that the shipped kinds of environments share: libraries, the operator's objects, rows, tool calls.

- A library is imported when its kind is used; if it is missing, the error names the extra that installs it.
- Servers need an event loop that always runs, or they close the connection while the policy thinks. So the clients of
  servers run on a loop of their own, in a thread.
- Rows that are not split by their source are split by their digest: a tenth is held out, another tenth is for
  validation.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from blake3 import blake3

from coordinator.environments.tool_calls import Turn
from protocol.errors import ConfigInvalid
from protocol.tasks import Prompt

Row = dict[str, Any]
Result = TypeVar("Result")

SPLIT_PARTS = 10
_OF_PART = {0: "held_out", 1: "validation"}


class ToolResult(NamedTuple):
    """The result of a tool call, as the policy reads it."""

    text: str
    failed: bool = False


Call = Callable[[str, Mapping[str, Any]], Awaitable[ToolResult]]
"""A tool by its name, with the arguments of the call."""


def library(name: str, extra: str) -> ModuleType:
    """Return the module `name` of a library that the extra `extra` installs."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise ConfigInvalid(
            f"These environments need a library that is not installed ({missing}).",
            hint=f"pip install 'echo-swarm[{extra}]'",
        ) from None


def unreachable(kind: str, url: str, error: BaseException) -> ConfigInvalid:
    """Return the error of a server of environments that does not answer."""
    return ConfigInvalid(
        f"The {kind} server at {url} does not answer: {str(error) or type(error).__name__}.",
        hint="Start it, or set task.parameters.url to where it runs.",
    )


def operator_object(place: str) -> Any:
    """Return the object at `file.py:name` or `package.module:name`."""
    source, _, name = place.rpartition(":")
    if not source or not name:
        raise ConfigInvalid(f"{place!r} names no object.", hint="Write file.py:Name or package.module:Name.")
    try:
        module = _file(Path(source).resolve()) if source.endswith(".py") else importlib.import_module(source)
        return getattr(module, name)
    except (FileNotFoundError, ModuleNotFoundError) as error:
        raise ConfigInvalid(
            f"{source} cannot be loaded: {error}.", hint="Paths are relative to the current folder."
        ) from None
    except AttributeError:
        raise ConfigInvalid(f"{source} has no {name}.") from None


@cache
def _file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source_rows(data: str | Mapping[str, str], split: str, seed: int, size: int) -> Iterator[Row]:
    """Return the rows of a split: of a JSON-lines file, of a file for each split, or of `file.py:function`.

    A function is called as `function(split, seed)`.
    """
    if isinstance(data, Mapping):
        return islice(_lines(data[split]), size) if split in data else iter(())
    if data.endswith((".jsonl", ".ndjson")):
        return islice((row for row in _lines(data) if split_of(row) == split), size)
    return islice(iter(operator_object(data)(split, seed)), size)


def _lines(file: str) -> Iterator[Row]:
    try:
        with Path(file).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _object(line, f"{file}:{number}")
    except OSError as error:
        raise ConfigInvalid(f"Cannot read {file}: {error.strerror}.") from error


def _object(line: str, where: str) -> Row:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigInvalid(f"{where} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise ConfigInvalid(f"{where} is not a JSON object.")
    return value


def split_of(value: Any) -> str:
    """Return the split of a value that its source does not split."""
    return _OF_PART.get(_number(value) % SPLIT_PARTS, "train")


def seeds(split: str, seed: int, size: int) -> Iterable[int]:
    """Return `size` seeds of episodes below 2^31; no two splits have one in common."""
    part = {"train": 2, "validation": 1, "held_out": 0}[split]
    for index in range(size):
        drawn = _number([split, seed if split == "train" else 0, index]) % (1 << 31)
        yield drawn - drawn % SPLIT_PARTS + (2 + drawn % (SPLIT_PARTS - 2) if part == 2 else part)


def _number(value: Any) -> int:
    return int.from_bytes(blake3(json.dumps(value, sort_keys=True).encode()).digest(length=8), "big")


def messages(prompt: Prompt | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a prompt as chat messages; text is a user's message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return [dict(each) if isinstance(each, Mapping) else {"role": each[0], "content": each[1]} for each in prompt]


class ToolCalls:
    """The tool calls of an episode, counted."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._run = self._failed = 0

    @property
    def components(self) -> dict[str, float]:
        """The number of calls, and of those that failed, as components of a reward."""
        return {"tool_calls": float(self._run), "tool_errors": float(self._failed)}

    async def messages(self, turn: Turn) -> list[dict[str, Any]] | None:
        """Return the results of a turn's tool calls, then the errors of unreadable ones; None without calls."""
        if not turn.calls and not turn.errors:
            return None
        results = [await self._call(each.name, each.arguments) for each in turn.calls]
        self._run += len(results)
        self._failed += sum(result.failed for result in results) + len(turn.errors)
        said = [
            {"role": "tool", "name": each.name, "content": result.text}
            for each, result in zip(turn.calls, results, strict=True)
        ]
        return said + [{"role": "tool", "content": f"Error: {each}"} for each in turn.errors]


async def settled(value: Any) -> Any:
    """Return the value, awaited if it is a coroutine."""
    return await value if inspect.isawaitable(value) else value


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="environments", daemon=True).start()
    return loop


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that runs on the servers' loop; wait for it."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


async def on_loop(work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of a coroutine that runs on the servers' loop."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, _loop()))


def later(function: Callable[[], object]) -> None:
    """Call a function on the servers' loop; do not wait."""
    if not (loop := _loop()).is_closed():
        loop.call_soon_threadsafe(function)
