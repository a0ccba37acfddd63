"""Tool calls are read in the formats of every family, and no text of a model can do more than be wrong."""

import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.environments.tool_calls import CALLS_MAX, ERRORS_MAX, FORMATS, ToolCall, Turn, parse
from protocol.errors import ConfigInvalid

CALL = ToolCall("add", {"a": 1, "b": [2, "x"]})
ARGUMENTS = '{"a": 1, "b": [2, "x"]}'
OBJECT = f'{{"name": "add", "arguments": {ARGUMENTS}}}'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"properties": {"a": {"type": "integer"}, "b": {"type": "array"}, "note": {"type": "string"}}},
    },
}

ONE_CALL = {
    "hermes": ("hermes", f"<tool_call>\n{OBJECT}\n</tool_call>"),
    "hermes, cut off": ("hermes", f"<tool_call>{OBJECT}"),
    "hermes, arguments as text": (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>',
    ),
    "qwen": (
        "qwen3_coder",
        '<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n[2, "x"]\n</parameter>\n'
        "</function>\n</tool_call>",
    ),
    "llama": ("llama3", f'<|python_tag|>{{"name": "add", "parameters": {ARGUMENTS}}}'),
    "llama, no tag": ("llama3", f'\n{{"type": "function", "name": "add", "parameters": {ARGUMENTS}}}'),
    "mistral": ("mistral", f"[TOOL_CALLS] [{OBJECT}]"),
    "mistral 11": ("mistral", f"[TOOL_CALLS]add{ARGUMENTS}"),
    "mistral 13": ("mistral", f"[TOOL_CALLS]add[CALL_ID]a1b2[ARGS]{ARGUMENTS}"),
    "deepseek 3.1": ("deepseek", DEEPSEEK.format(f"add<｜tool▁sep｜>{ARGUMENTS}")),
    "deepseek 3": ("deepseek", DEEPSEEK.format(f"function<｜tool▁sep｜>add\n```json\n{ARGUMENTS}\n```")),
    "pythonic": ("pythonic", "[add(a=1, b=[2, 'x'])]"),
    "llama 4": ("pythonic", '<|python_start|>[add(a=1, b=(2, "x"),)]<|python_end|>'),
    "gemma": ("pythonic", '```tool_code\nadd(a=1, b=[2, """x"""])\n```'),
}


@pytest.mark.parametrize(("format", "text"), ONE_CALL.values(), ids=ONE_CALL)
def test_a_call_is_read_in_the_format_of_its_family(format: str, text: str) -> None:
    for name in (format, "auto"):
        assert parse(text, name, [ADD]) == Turn("", (CALL,))


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (f"First.\n<tool_call>{OBJECT}</tool_call>\n<tool_call>{OBJECT}</tool_call>", "First.", ["add", "add"]),
        ("Say <tool_call><function=f></function></tool_call><tool_call><function=g></function>", "Say", ["f", "g"]),
        ('<|python_tag|>{"name": "f"}; {"name": "g"}', "", ["f", "g"]),
        ('So [TOOL_CALLS]f{}[TOOL_CALLS]g[ARGS]{"a": 1}', "So", ["f", "g"]),
        ('So [TOOL_CALLS][{"name": "f"}, {"name": "g"}]', "So", ["f", "g"]),
        (DEEPSEEK.format("f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜>{}"), "", ["f", "g"]),
        ("[f(), g(a=-1.5e3, b={'k': None})]", "", ["f", "g"]),
        ("I add.\n```tool_code\nf()\ng(x=True)\n```\nDone.", "I add.\n\nDone.", ["f", "g"]),
    ],
)
def test_several_calls_are_read_in_their_order(text: str, content: str, names: list[str]) -> None:
    turn = parse(text)
    assert (turn.content, [call.name for call in turn.calls], turn.errors) == (content, names, ())


def test_a_turn_without_calls_is_left_as_it_is() -> None:
    for text in ("", " The answer is 4.\n", "[1, 2]", '{"answer": 4}', "[not a call]", "a < b"):
        for format in FORMATS:
            assert parse(text, format) == Turn(text)


def test_bare_json_of_an_unknown_tool_is_an_answer_and_no_call() -> None:
    assert parse('{"name": "Ada", "age": 36}', tools=[ADD]).calls == ()
    assert parse("[f(x) = 3]", tools=[ADD]) == Turn("[f(x) = 3]")


def test_calls_in_a_thought_do_not_count() -> None:
    call = f"<tool_call>{OBJECT}</tool_call>"
    assert parse(f"<think>{call}</think>{call}") == Turn(f"<think>{call}</think>", (CALL,))
    assert parse(f"opened by the template {call}</think>4").calls == ()
    assert parse(f"<think>cut off {call}").calls == ()


def test_markers_within_texts_of_json_are_text() -> None:
    turn = parse('<tool_call>{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}</tool_call>')
    assert turn == Turn("", (ToolCall("f", {"a": "</tool_call><tool_call>"}),))


def test_parameters_get_the_types_of_the_schema() -> None:
    said = "<function=add><parameter=a>{}</parameter><parameter=note>3</parameter></function>"
    assert parse(said.format("3"), tools=[ADD]).calls[0].arguments == {"a": 3, "note": "3"}
    assert parse(said.format("three"), tools=[ADD]).calls[0].arguments == {"a": "three", "note": "3"}
    assert parse(said.format("3")).calls[0].arguments == {"a": "3", "note": "3"}


ANY_SCHEMA: list[tuple[Any, Any]] = [
    ({"type": ["integer", "null"]}, 3),
    ({"type": ["string", "null"]}, "3"),
    ({"anyOf": [{"type": "integer"}, True]}, 3),
    ({"anyOf": 5}, "3"),
    ({"type": {"type": "integer"}}, "3"),
    (True, "3"),
]


@pytest.mark.parametrize(("schema", "value"), ANY_SCHEMA)
def test_a_schema_of_a_client_may_have_any_form(schema: Any, value: Any) -> None:
    tool = {"function": {"name": "add", "parameters": {"properties": {"a": schema}}}}
    (call,) = parse("<function=add><parameter=a>3</parameter></function>", tools=[tool]).calls
    assert call.arguments == {"a": value}


def test_python_texts_are_read_without_running_them() -> None:
    turn = parse(r"""[f(a='it\'s', b="x\n\x41\u00e9\d", c='''two
lines''', d=true, e=null, g={"k": [1, {}]})]""")
    assert turn.calls[0].arguments == {
        "a": "it's", "b": "x\nAé\\d", "c": "two\nlines", "d": True, "e": None, "g": {"k": [1, {}]},
    }  # fmt: skip


WRONG = {
    "bad JSON": ('<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "not JSON"),
    "cut off": ('<tool_call>{"name": "f", "argu', "not JSON"),
    "NaN": ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN"),
    "infinite": ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "too large"),
    "digits": (f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "too many digits"),
    "a key twice": ('<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "occurs twice"),
    "half a character": ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
    "no name": ('<tool_call>{"arguments": {}}</tool_call>', "name"),
    "no object": ("<tool_call>[1]</tool_call>", "object"),
    "arguments are a list": ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "no JSON object"),
    "text behind": (f"<tool_call>{OBJECT} and so on</tool_call>", "missing behind"),
    "deep": (f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 200}{"]" * 200}}}}}</tool_call>', "nested"),
    "very deep": ('<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 100_000, "nested"),
    "qwen, parameter": ("<function=f><parameter=a>1</function>", "</parameter> is missing"),
    "qwen, twice": ("<function=f><parameter=a>1</parameter><parameter=a>2</parameter></function>", "twice"),
    "qwen, end": ("<function=f><parameter=a>1</parameter> and so on", "</function> is missing"),
    "qwen, tag": ("<function=f", "no end"),
    "llama": ("<|python_tag|>import os", "No JSON object"),
    "mistral": ("[TOOL_CALLS]f{", "not JSON"),
    "mistral, empty": ("[TOOL_CALLS]", "name"),
    "deepseek": ("<｜tool▁call▁begin｜>f{}", "is missing"),
    "deepseek, name": ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>f", "name"),
    "pythonic, code": ("[f(a=__import__('os'))]", "no literal"),
    "pythonic, no name": ("[f(1)]", "has a name"),
    "pythonic, twice": ("[f(a=1, a=2)]", "twice"),
    "pythonic, deep": (f"[f(a={'[' * 100_000})]", "nested"),
    "pythonic, digits": (f"[f(a={'9' * 5000})]", "digits"),
}


@pytest.mark.parametrize(("text", "reason"), WRONG.values(), ids=WRONG)
def test_a_wrong_call_is_an_error_and_no_exception(text: str, reason: str) -> None:
    turn = parse(text)
    assert turn.calls == ()
    assert len(turn.errors) == 1
    assert reason in turn.errors[0]
    assert len(turn.errors[0]) < 500


def test_an_unknown_tool_is_an_error_and_the_others_are_called() -> None:
    turn = parse(f'<tool_call>{{"name": "sub"}}</tool_call><tool_call>{OBJECT}</tool_call>', tools=[ADD])
    assert turn.calls == (CALL,)
    assert turn.errors == ("Call 1 cannot be read: There is no tool 'sub'. There are: add.",)


def test_a_call_after_a_wrong_one_is_read() -> None:
    for text in (
        f"<tool_call>{{]</tool_call><tool_call>{OBJECT}</tool_call>",
        f"[TOOL_CALLS]add{{][TOOL_CALLS]add{ARGUMENTS}",
        DEEPSEEK.format(f"add<｜tool▁sep｜>{{]<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ARGUMENTS}"),
    ):
        turn = parse(text)
        assert turn.calls == (CALL,)
        assert len(turn.errors) == 1


def test_floods_of_calls_and_errors_end() -> None:
    many = parse(f"<tool_call>{OBJECT}</tool_call>" * 1000)
    assert len(many.calls) == CALLS_MAX
    assert len(many.errors) == 1
    assert len(parse("<tool_call></tool_call>" * 1000).errors) == ERRORS_MAX


def test_an_unknown_format_is_the_operators_mistake() -> None:
    with pytest.raises(ConfigInvalid, match="no tool format"):
        parse("", "cobol")


MILLION = 1_000_000
PIECES = (
    "<tool_call>", "<tool_call>{", '<tool_call>{"', "<function=", "<function=f><parameter=a>", "[TOOL_CALLS]",
    "[TOOL_CALLS]f", "<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>", "<|python_tag|>",
    "```tool_code\n", "<think>", "[f(a=", "[f(", "[ ", "[\n", "f(", "{", '{"name": ', '"', "\\", " ", "\n", "'''",
    "a.", "9", "<｜tool",
)  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
def test_a_million_characters_are_read_in_linear_time(piece: str) -> None:
    """A parser that goes back for each marker would need hours, and the test would never end."""
    for start in ("", "<tool_call>", "<function=f><parameter=a>", "[TOOL_CALLS]", "[f(a=", "```tool_code\n", '[f(a="'):
        for format in FORMATS:
            parse(start + piece * (MILLION // len(piece)), format)


MARKERS = [piece for piece in PIECES if len(piece) > 1] + [
    OBJECT, "</tool_call>", "</function>", "</parameter>", "```", "]", ")", "}", ",", "=", ":", "1", "a", "</think>",
]  # fmt: skip


@given(st.lists(st.sampled_from(MARKERS) | st.text(max_size=4)).map("".join), st.sampled_from(FORMATS))
def test_no_text_raises(text: str, format: str) -> None:
    turn = parse(text, format)
    assert len(turn.errors) <= ERRORS_MAX
    for call in turn.calls:
        json.dumps(call.arguments, allow_nan=False).encode()


NAMES = st.text(string.ascii_letters, min_size=1, max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(NAMES, st.dictionaries(NAMES, VALUES), st.sampled_from(["hermes", "llama3", "mistral", "deepseek", "pythonic"]))
def test_every_call_survives_the_way_through_its_format(name: str, arguments: dict[str, Any], format: str) -> None:
    said = json.dumps(arguments)
    python = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    written = {
        "hermes": f'<tool_call>{{"name": "{name}", "arguments": {said}}}</tool_call>',
        "llama3": f'<|python_tag|>{{"name": "{name}", "parameters": {said}}}',
        "mistral": f"[TOOL_CALLS]{name}[ARGS]{said}",
        "deepseek": DEEPSEEK.format(f"{name}<｜tool▁sep｜>{said}"),
        "pythonic": f"[{name}({python})]",
    }
    if "</think>" in written[format] or any(key in ("true", "null") for key in arguments):
        return
    assert parse(written[format], format).calls == (ToolCall(name, arguments),)
