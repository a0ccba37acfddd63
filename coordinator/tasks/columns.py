"""The conversion of a row to a problem: the columns of prompt and answer, and the forms of a prompt.

- A prompt is text, or messages `{"role", "content"}`. An answer may have any type; the task gets it as text, and
  rewards get it unchanged.
- All columns except the prompt are passed to rewards, under their own names.
"""

import json
from collections.abc import Mapping
from typing import Any

from coordinator.config import DataSection
from protocol.errors import ConfigInvalid
from protocol.tasks import ChatMessage, Problem, Prompt

PROMPTS = ("prompt", "question", "problem", "input", "instruction")
ANSWERS = ("answer", "ground_truth", "reward_model.ground_truth", "solution", "target", "label", "output")
"""The usual columns of prompts and answers, if `data.columns` names none; `a.b` is a key in a column, as in verl."""

_NOWHERE = object()


class Columns:
    """The reader of the rows of one source."""

    def __init__(self, settings: DataSection, suffix: str) -> None:
        self._settings, self._suffix = settings, suffix

    def problem(self, row: Mapping[str, Any], where: str) -> Problem:
        asked, answered = self._place(row, "prompt", PROMPTS), self._place(row, "answer", ANSWERS)
        if asked is None:
            raise ConfigInvalid(
                f"{where} has no prompt: its columns are {', '.join(map(str, row)) or 'none'}.",
                hint='Name the prompt column: data.columns = {prompt = "…"}.',
            )
        value = _at(row, asked, where)
        answer = None if answered is None else _at(row, answered, where)
        columns = {str(name): _plain(each) for name, each in row.items() if name != asked}
        if answer is not None:
            columns["answer"] = _plain(answer)
        return Problem(self._prompt(value, where), _text(answer), columns)

    def _place(self, row: Mapping[str, Any], what: str, usual: tuple[str, ...]) -> str | None:
        if (chosen := self._settings.columns.get(what)) is not None:
            return chosen
        return next((name for name in usual if _value_at(row, name) not in (None, _NOWHERE)), None)

    def _prompt(self, value: Any, where: str) -> Prompt:
        if isinstance(value, str) and value:
            text = value + self._suffix
            return (ChatMessage("user", text),) if self._settings.chat else text
        if isinstance(value, list) and value and all(map(_is_message, value)):
            messages = [ChatMessage(str(each["role"]), each["content"]) for each in value]
            last = messages[-1]
            return (*messages[:-1], last._replace(content=last.content + self._suffix))
        raise ConfigInvalid(
            f"{where}: the prompt is neither text nor messages, but {json.dumps(_plain(value))[:60]}.",
            hint='Messages look like {"role": "user", "content": "…"}; pictures and tools are not supported.',
        )


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and "role" in value and isinstance(value.get("content"), str)


def _at(row: Mapping[str, Any], place: str, where: str) -> Any:
    value = _value_at(row, place)
    if value is _NOWHERE:
        raise ConfigInvalid(f"{where} has no column {place}: there are {', '.join(map(str, row))}.")
    return value


def _value_at(row: Mapping[str, Any], place: str) -> Any:
    """Return the value at `a.b`: a column of that name, or a key in column `a`."""
    if place in row:
        return row[place]
    value: Any = row
    for part in place.split("."):
        if isinstance(value, str):  # verl keeps some columns as JSON text
            value = _read(value)
        if not isinstance(value, Mapping) or part not in value:
            return _NOWHERE
        value = value[part]
    return value


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _text(answer: Any) -> str:
    if answer is None:
        return ""
    return answer if isinstance(answer, str) else json.dumps(_plain(answer), ensure_ascii=False)


def _plain(value: Any) -> Any:
    """Return the value in the types of JSON: dates, decimals and the like as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)
