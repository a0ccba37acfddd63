"""Tool calls in the text of a model's turn, in the formats of the model families.

    hermes       <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>          Hermes, Qwen 2.5 and 3
    qwen3_coder  <function=f><parameter=a>1</parameter></function>, in <tool_call>    Qwen3-Coder, Qwen 3.5
    llama3       <|python_tag|>{"name": "f", "parameters": {"a": 1}}; …               Llama 3; the tag may be missing
    mistral      [TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}], or [TOOL_CALLS]f[ARGS]{"a": 1}
    deepseek     <｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>         V3.1; V3 and R1 fence the JSON
    pythonic     [f(a=1), g(b="x")], or lines in a ```tool_code block                 Llama 4, Gemma 3

- A model may write anything: a mistake in a call is a text in `errors`, never an exception.
- The time is linear in the length of the text. Reading ends after `ERRORS_MAX` errors, since each may cost one pass.
- JSON is strict: no NaN, no key twice, no value deeper than `NESTING_MAX`, no half of a surrogate pair.
- Text in <think> tags is a thought: calls in it do not count.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from protocol.errors import ConfigInvalid

CALLS_MAX = 64
"""The calls of one turn that are read; episodes allow fewer."""

ERRORS_MAX = 8
"""The errors of one turn that are read: they go back to the model, and each may cost one pass over the text."""

NESTING_MAX = 100
"""The depth of an argument: far below the interpreter's recursion limit, wherever the parser is called."""

NAME_MAX_CHARS = 128


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one tool."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the model: its text without the calls, the calls in their order, and what was wrong with others."""

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[str, ...] = ()


class _BadCall(ValueError):
    """A mistake in one call; its text is for the model."""


class _EnoughErrors(Exception):
    """The rest of the turn is not read."""


def parse(text: str, format: str = "auto", tools: Sequence[Mapping[str, Any]] = ()) -> Turn:
    """Return the calls in a turn; with `tools`, as `schema_of` returns them, a call of any other tool is an error."""
    if format not in FORMATS:
        raise ConfigInvalid(f"There is no tool format {format!r}.", hint=f"Use one of {', '.join(FORMATS)}.")
    start = _end_of_thought(text)
    known = {str(tool["function"]["name"]): tool["function"].get("parameters", {}) for tool in tools}
    name = _detected(text, start, known) if format == "auto" else format
    if not name:
        return Turn(text)
    found = _Reading(text, start, known)
    with suppress(_EnoughErrors):
        _READERS[name](found)
    return found.turn()


@dataclass
class _Reading:
    """The part of a turn that is read, and its results so far."""

    text: str
    start: int
    known: Mapping[str, Mapping[str, Any]]
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def turn(self) -> Turn:
        if not self.calls and not self.errors:
            return Turn(self.text)
        return Turn((self.text[: self.start] + "".join(self.content)).strip(), tuple(self.calls), tuple(self.errors))

    def call(self, name: Any, arguments: Any) -> None:
        """Add a call; raise an error if it cannot be one."""
        if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX_CHARS:
            raise _BadCall("The name of the tool is missing or too long.")
        if isinstance(arguments, str):
            arguments, _ = _decoded(arguments, 0)
        if not isinstance(arguments, dict):
            raise _BadCall(f"The arguments of {name} are no JSON object.")
        _require_sound([name, arguments])
        if self.known and name not in self.known:
            raise _BadCall(f"There is no tool {name!r}. There are: {', '.join(self.known)}.")
        if len(self.calls) == CALLS_MAX:
            self.errors.append(f"Only the first {CALLS_MAX} calls are read.")
            raise _EnoughErrors
        self.calls.append(ToolCall(name, arguments))

    def object(self, value: Any) -> None:
        """Add a call that is a JSON object."""
        if not isinstance(value, dict):
            raise _BadCall('A call is a JSON object with "name" and "arguments".')
        key = "arguments" if "arguments" in value else "parameters"
        self.call(value.get("name"), value.get(key, {}))

    def error(self, mistake: _BadCall) -> None:
        number = len(self.calls) + len(self.errors) + 1
        self.errors.append(f"Call {number} cannot be read: {mistake}")
        if len(self.errors) == ERRORS_MAX:
            raise _EnoughErrors

    def each(self, opening: str, closing: str, read: Callable[[int], int]) -> None:
        """Read a call behind every `opening`; `read` returns its end.

        After an error, go on behind the next `closing`, or at the next `opening` if that is empty.
        """
        place = self.start
        while (at := self.text.find(opening, place)) >= 0:
            self.content.append(self.text[place:at])
            inside = at + len(opening)
            try:
                place = read(inside)
            except _BadCall as mistake:
                close = self.text.find(closing or opening, inside)
                place = len(self.text) if close < 0 else close + len(closing)
                self.error(mistake)
        self.content.append(self.text[place:])


THOUGHT, THOUGHT_END = "<think>", "</think>"


def _end_of_thought(text: str) -> int:
    """Return where the thought ends; a template may have opened it, and a turn may be cut off in it."""
    if (end := text.find(THOUGHT_END)) >= 0:
        return end + len(THOUGHT_END)
    return len(text) if text.lstrip().startswith(THOUGHT) else 0


def _detected(text: str, start: int, known: Mapping[str, Any]) -> str:
    """Return the format of the first marker; "" if there is none. A bare call counts if its tool is known."""
    places = [(place, name) for marker, name in _MARKERS.items() if (place := text.find(marker, start)) >= 0]
    if places:
        place, name = min(places)
        inside = _skip(text, place + len(TOOL_CALL))
        return "qwen3_coder" if name == "hermes" and text.startswith(FUNCTION, inside) else name
    first = _skip(text, start)
    if bare := _BARE_LIST.match(text, first):
        return "pythonic" if not known or bare[1] in known else ""
    if bare := _BARE_OBJECT.match(text, first):
        return "llama3" if not known or not bare[1] or bare[1] in known else ""
    return ""


_SPACE = re.compile(r"\s*+")


def _skip(text: str, place: int) -> int:
    """Return the place of the next character that is no white space."""
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _skip_one(text: str, place: int, *words: str) -> int:
    """Return the place behind white space and behind one of `words`, if it stands there."""
    place = _skip(text, place)
    return next((place + len(word) for word in words if text.startswith(word, place)), place)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise _BadCall(f"The key {name[:NAME_MAX_CHARS]!r} occurs twice.")
        made[name] = value
    return made


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _BadCall(f"The number {digits[:20]} is too large.")
    return number


def _no_constant(name: str) -> NoReturn:
    raise _BadCall(f"{name} is no JSON.")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)


def _decoded(text: str, place: int) -> tuple[Any, int]:
    """Return the JSON value at a place, and its end."""
    try:
        return _DECODER.raw_decode(text, _skip(text, place))
    except _BadCall:
        raise
    except json.JSONDecodeError as error:
        raise _BadCall(f"It is not JSON: {error.msg}.") from None
    except ValueError:
        raise _BadCall("It contains a number with too many digits.") from None
    except RecursionError:
        raise _BadCall(f"Its values are nested more than {NESTING_MAX} deep.") from None


def _require_sound(value: Any) -> None:
    """Refuse a value that is nested too deep, or a text that is no Unicode."""
    level = [value]
    for _ in range(NESTING_MAX):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str):
                _require_unicode(each)
            elif isinstance(each, dict):
                inner += [*each, *each.values()]
            elif isinstance(each, list):
                inner += each
        if not inner:
            return
        level = inner
    raise _BadCall(f"Its values are nested more than {NESTING_MAX} deep.")


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _BadCall("A text contains half of a surrogate pair.") from None


TOOL_CALL, TOOL_CALL_END = "<tool_call>", "</tool_call>"


def _read_hermes(found: _Reading) -> None:
    text = found.text

    def read(place: int) -> int:
        value, end = _decoded(text, place)
        after = _skip_one(text, end, TOOL_CALL_END)
        if after < len(text) and not text.startswith(TOOL_CALL_END, after - len(TOOL_CALL_END)):
            raise _BadCall(f"{TOOL_CALL_END} is missing behind the JSON object.")
        found.object(value)
        return after

    found.each(TOOL_CALL, TOOL_CALL_END, read)


FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


def _read_qwen3_coder(found: _Reading) -> None:
    text = found.text

    def read(place: int) -> int:
        name, place = _tag_name(text, place)
        properties = found.known.get(name, {}).get("properties", {})
        arguments: dict[str, Any] = {}
        while text.startswith(PARAMETER, place := _skip(text, place)):
            key, inside = _tag_name(text, place + len(PARAMETER))
            end = text.find(PARAMETER_END, inside)
            if end < 0:
                raise _BadCall(f"{PARAMETER_END} is missing.")
            if key in arguments:
                raise _BadCall(f"The parameter {key!r} occurs twice.")
            value = text[inside:end].removeprefix("\n").removesuffix("\n")
            arguments[key] = _typed(value, properties.get(key, {}))
            place = end + len(PARAMETER_END)
        if not text.startswith(FUNCTION_END, place):
            raise _BadCall(f"{FUNCTION_END} is missing.")
        found.call(name, arguments)
        return _skip_one(text, place + len(FUNCTION_END), TOOL_CALL_END)

    found.each(FUNCTION, FUNCTION_END, read)
    found.content = [piece.replace(TOOL_CALL, "").replace(TOOL_CALL_END, "") for piece in found.content]


def _tag_name(text: str, place: int) -> tuple[str, int]:
    """Return the name in a tag such as <function=f>, and the place behind the tag."""
    end = text.find(">", place, place + NAME_MAX_CHARS + 1)
    if end < 0:
        raise _BadCall("A tag has no end.")
    return text[place:end].strip(), end + 1


_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


def _typed(value: str, schema: Mapping[str, Any]) -> Any:
    """Return a text as its parameter's type; a text that has another type stays a text."""
    kinds = _kinds(schema)
    if not kinds or "string" in kinds:
        return value
    if value.strip() in _WORDS:
        return _WORDS[value.strip()]
    try:
        made, end = _decoded(value, 0)
    except _BadCall:
        return value
    return made if _skip(value, end) == len(value) else value


def _kinds(schema: Any) -> set[str]:
    """Return the types that a schema names; a schema may come from a client, and have any form."""
    options = schema.get("anyOf") if isinstance(schema, Mapping) else None
    kinds: set[str] = set()
    for option in (schema, *(options if isinstance(options, list | tuple) else ())):
        named = option.get("type") if isinstance(option, Mapping) else None
        kinds.update(each for each in (named if isinstance(named, list) else [named]) if isinstance(each, str))
    return kinds


PYTHON_TAG = "<|python_tag|>"


def _read_llama3(found: _Reading) -> None:
    text, place = found.text, found.start
    if (at := text.find(PYTHON_TAG, place)) >= 0:
        found.content.append(text[place:at])
        place = at + len(PYTHON_TAG)
    elif not _BARE_OBJECT.match(text, _skip(text, place)):
        return
    try:
        while (place := _skip_one(text, place, ";", PYTHON_TAG)) < len(text):
            if not text.startswith("{", place := _skip(text, place)):
                break
            value, place = _decoded(text, place)
            found.object(value)
        if not found.calls:
            raise _BadCall("No JSON object follows.")
        found.content.append(text[place:])
    except _BadCall as mistake:
        found.error(mistake)


TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[\w.-]++")


def _read_mistral(found: _Reading) -> None:
    text = found.text

    def read(place: int) -> int:
        place = _skip(text, place)
        if text.startswith(("[", "{"), place):
            values, end = _decoded(text, place)
            for value in values if isinstance(values, list) else [values]:
                found.object(value)
            return end
        name = _NAME.match(text, place)
        if not name:
            raise _BadCall("The name of the tool is missing.")
        place = name.end()
        if text.startswith(CALL_ID, place) and (number := _NAME.match(text, place + len(CALL_ID))):
            place = number.end()
        arguments, end = _decoded(text, _skip_one(text, place, ARGS))
        found.call(name[0], arguments)
        return end

    found.each(TOOL_CALLS, "", read)


CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEP, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCE = "```"


def _read_deepseek(found: _Reading) -> None:
    text = found.text

    def read(place: int) -> int:
        sep = text.find(CALL_SEP, place, place + NAME_MAX_CHARS + len(CALL_SEP))
        if sep < 0:
            raise _BadCall(f"{CALL_SEP} is missing.")
        name, place = text[place:sep], sep + len(CALL_SEP)
        if not text.startswith("{", _skip(text, place)):  # V3 and R1: the type of the tool, then its name on a line
            line = text.find("\n", place, place + NAME_MAX_CHARS + 1)
            if line < 0:
                raise _BadCall("The name of the tool is missing.")
            name, place = text[place:line], _skip_one(text, line, f"{_FENCE}json", _FENCE)
        arguments, end = _decoded(text, place)
        end = _skip_one(text, _skip_one(text, end, _FENCE), CALL_END)
        if end < len(text) and not text.startswith(CALL_END, end - len(CALL_END)):
            raise _BadCall(f"{CALL_END} is missing.")
        found.call(name.strip(), arguments)
        return end

    found.each(CALL_BEGIN, CALL_END, read)
    found.content = [piece.replace(CALLS_BEGIN, "").replace(CALLS_END, "") for piece in found.content]


PYTHON_START, PYTHON_END, TOOL_CODE = "<|python_start|>", "<|python_end|>", "```tool_code"


def _read_pythonic(found: _Reading) -> None:
    text = found.text
    if text.find(TOOL_CODE, found.start) >= 0:
        found.each(TOOL_CODE, _FENCE, lambda place: _Python(found, place).block())
    elif text.find(PYTHON_START, found.start) >= 0:
        found.each(PYTHON_START, PYTHON_END, lambda place: _Python(found, place).list())
    elif at := _BARE_LIST.match(text, _skip(text, found.start)) or _BARE_LIST_LINE.search(text, found.start):
        found.content.append(text[found.start : at.start()])
        try:
            found.content.append(text[_Python(found, at.start()).list() :])
        except _BadCall as mistake:
            found.error(mistake)


_IDENTIFIER = re.compile(r"[A-Za-z_]\w*+(?:\.[A-Za-z_]\w*+)*+")
_NUMBER = re.compile(r"[+-]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][+-]?\d++)?+")
_STRINGS = re.compile(
    r"'''((?:[^'\\]++|\\.|'(?!''))*+)'''|\"\"\"((?:[^\"\\]++|\\.|\"(?!\"\"))*+)\"\"\""
    r"|'((?:[^'\\\n]++|\\.)*+)'|\"((?:[^\"\\\n]++|\\.)*+)\"",
    re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\", "'": "'", '"': '"', "\n": ""}


class _Python:
    """A reader of calls written as Python with named arguments, all of them literals."""

    def __init__(self, found: _Reading, place: int) -> None:
        self._found, self._text, self._place = found, found.text, place

    def list(self) -> int:
        """Read `[f(a=1), g()]`; return its end, with the marker that may follow."""
        self._expect("[")
        if not self._next("]"):
            self._call()
            while not self._next("]"):
                self._expect(",")
                self._call()
        return _skip(self._text, _skip_one(self._text, self._place, PYTHON_END))

    def block(self) -> int:
        """Read calls up to the end of a fenced block; return its end."""
        if self._peek("["):
            self.list()
        while not self._next(_FENCE) and _skip(self._text, self._place) < len(self._text):
            self._call()
            self._next(";")
        return self._place

    def _call(self) -> None:
        name, arguments = self._identifier(), dict[str, Any]()
        self._expect("(")
        while not self._next(")"):
            if arguments:
                self._expect(",")
                if self._next(")"):
                    break
            key = self._identifier()
            self._expect("=")
            if key in arguments:
                raise _BadCall(f"The argument {key[:NAME_MAX_CHARS]!r} occurs twice.")
            arguments[key] = self._value(NESTING_MAX)
        self._found.call(name, arguments)

    def _value(self, depth: int) -> Any:
        if depth == 0:
            raise _BadCall(f"Its values are nested more than {NESTING_MAX} deep.")
        if self._next("["):
            return self._items("]", depth)
        if self._next("("):
            return self._items(")", depth)
        if self._next("{"):
            return self._pairs(depth)
        if (text := self._string()) is not None:
            return text
        if match := _NUMBER.match(self._text, _skip(self._text, self._place)):
            self._place = match.end()
            return _python_number(match[0])
        word = self._identifier()
        if word not in _WORDS:
            raise _BadCall(f"The value {word[:NAME_MAX_CHARS]} is no literal.")
        return _WORDS[word]

    def _items(self, closing: str, depth: int) -> Any:
        items = []
        while not self._next(closing):
            items.append(self._value(depth - 1))
            if not self._next(","):
                self._expect(closing)
                break
        return items

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs = []
        while not self._next("}"):
            key = self._string()
            if key is None:
                raise _BadCall("A key is no text.")
            self._expect(":")
            pairs.append((key, self._value(depth - 1)))
            if not self._next(","):
                self._expect("}")
                break
        return _unique(pairs)

    def _string(self) -> str | None:
        match = _STRINGS.match(self._text, _skip(self._text, self._place))
        if not match:
            return None
        self._place = match.end()
        return _ESCAPE.sub(_unescaped, next(group for group in match.groups() if group is not None))

    def _identifier(self) -> str:
        match = _IDENTIFIER.match(self._text, _skip(self._text, self._place))
        if not match:
            raise _BadCall('Calls look like f(a=1, b="x"): every argument has a name, and its value is a literal.')
        self._place = match.end()
        return match[0]

    def _peek(self, word: str) -> bool:
        return self._text.startswith(word, _skip(self._text, self._place))

    def _next(self, word: str) -> bool:
        """Return True, and go on behind the word, if it comes next."""
        if there := self._peek(word):
            self._place = _skip(self._text, self._place) + len(word)
        return there

    def _expect(self, word: str) -> None:
        if not self._next(word):
            raise _BadCall(f"{word!r} is missing.")


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code is None:
        return _SHORT.get(match[4], match[0])
    return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else match[0]


def _python_number(digits: str) -> int | float:
    if any(letter in digits for letter in ".eE"):
        return _finite(digits)
    try:
        return int(digits)
    except ValueError:
        raise _BadCall("It contains a number with too many digits.") from None


_BARE_LIST = re.compile(r"\[\s*+([A-Za-z_][\w.]*+)\s*+\(")
_BARE_LIST_LINE = re.compile(r"^" + _BARE_LIST.pattern, re.MULTILINE)
_BARE_OBJECT = re.compile(r'\{\s*+(?:"name"\s*+:\s*+"([^"\\]*+)"|"type"\s*+:\s*+"function")')

_MARKERS = {
    TOOL_CALL: "hermes",
    FUNCTION: "qwen3_coder",
    PYTHON_TAG: "llama3",
    TOOL_CALLS: "mistral",
    CALLS_BEGIN: "deepseek",
    CALL_BEGIN: "deepseek",
    PYTHON_START: "pythonic",
    TOOL_CODE: "pythonic",
}

_READERS: Mapping[str, Callable[[_Reading], None]] = {
    "hermes": _read_hermes,
    "qwen3_coder": _read_qwen3_coder,
    "llama3": _read_llama3,
    "mistral": _read_mistral,
    "deepseek": _read_deepseek,
    "pythonic": _read_pythonic,
}

FORMATS = ("auto", *_READERS)
