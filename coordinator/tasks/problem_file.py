"""The file of a split: a problem on each line, of which each can be read without the others.

A problem is one value of JSON; task processes get it in the same form.

{"prompt": "text" or [[role, content], …], "answer": "…", "columns": {name: value}}
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from protocol.tasks import ChatMessage, Problem, Prompt


def to_value(problem: Problem) -> dict[str, Any]:
    return {"prompt": problem.prompt, "answer": problem.answer, "columns": dict(problem.columns)}


def from_value(value: Mapping[str, Any]) -> Problem:
    prompt = value["prompt"]
    return Problem(prompt if isinstance(prompt, str) else messages(prompt), value["answer"], value["columns"])


def messages(pairs: list[list[str]]) -> Prompt:
    return tuple(ChatMessage(role, content) for role, content in pairs)


class Book(Sequence[Problem]):
    """The problems of a file, which stays open; a line is found by its offset."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._begins = _line_begins(path)

    def __len__(self) -> int:
        return len(self._begins) - 1

    @overload
    def __getitem__(self, number: int) -> Problem: ...
    @overload
    def __getitem__(self, number: slice) -> "Sequence[Problem]": ...

    def __getitem__(self, number: int | slice) -> "Problem | Sequence[Problem]":
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        at = range(len(self))[number]
        begin, end = int(self._begins[at]), int(self._begins[at + 1])
        return from_value(json.loads(os.pread(self._file, end - begin, begin)))

    def __iter__(self) -> Iterator[Problem]:
        return (self[number] for number in range(len(self)))

    def __del__(self) -> None:
        if (file := getattr(self, "_file", None)) is not None:
            os.close(file)


def line(problem: Problem) -> bytes:
    """Return a problem as a line of such a file; equal problems give equal bytes."""
    # ASCII: half a surrogate pair, which some data has, cannot be encoded as UTF-8.
    return json.dumps(to_value(problem), sort_keys=True, separators=(",", ":")).encode() + b"\n"


def _line_begins(path: Path) -> np.ndarray:
    ends = [0]
    with path.open("rb") as file:
        for each in file:
            ends.append(ends[-1] + len(each))
    return np.array(ends, dtype=np.int64)
