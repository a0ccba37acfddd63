"""A problem as a value of JSON, and back: how a round keeps its problems, and how its reward processes get them.

{"prompt": "text" or [[role, content], …], "answer": "…", "columns": {name: value}}
"""

from collections.abc import Mapping
from typing import Any

from protocol.tasks import ChatMessage, Problem, Prompt


def to_value(problem: Problem) -> dict[str, Any]:
    return {"prompt": problem.prompt, "answer": problem.answer, "columns": dict(problem.columns)}


def from_value(value: Mapping[str, Any]) -> Problem:
    prompt = value["prompt"]
    return Problem(prompt if isinstance(prompt, str) else messages(prompt), value["answer"], value["columns"])


def messages(pairs: list[list[str]]) -> Prompt:
    return tuple(ChatMessage(role, content) for role, content in pairs)
