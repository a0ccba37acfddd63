"""Bodies of requests to the endpoint: what they mean, and how hostile ones are refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.endpoint.requests import CompletionQuery, model_version, read_chat, read_completion
from protocol import limits
from protocol.errors import FieldRefused, MalformedMessage, MessageTooLarge, SwarmError

USER = {"role": "user", "content": "Hi"}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "",
        "parameters": {"type": "object", "properties": {"city": {"type": ["string", "null"]}}},
    },
}


def completion(**fields: Any) -> CompletionQuery:
    return read_completion(json.dumps({"model": "m", "prompt": "Hi", **fields}).encode())


def chat(**fields: Any) -> CompletionQuery:
    return read_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def test_a_query_has_the_fields_of_the_body() -> None:
    fields = {"n": 4, "max_tokens": 7, "temperature": 1, "stop": "x", "logprobs": 0, "seed": -5, "stream": True}
    more = {"stream_options": {"include_usage": True}, "return_token_ids": True, "user": "u", "top_p": None}
    more |= {"priority": -3, "max_price_micros_per_mtok": 9}
    assert completion(**fields, **more) == CompletionQuery(
        "m", ("Hi",), n=4, max_tokens=7, temperature=1.0, stop=("x",), logprobs=True, seed=-5, stream=True,
        include_usage=True, return_token_ids=True, priority=-3, max_price_micros_per_mtok=9,
    )  # fmt: skip
    assert completion() == CompletionQuery("m", ("Hi",))


PROMPTS = [
    ("a", ("a",)),
    (["a", "b"], ("a", "b")),
    ([1, 2], ((1, 2),)),
    ([[1, 2], [0]], ((1, 2), (0,))),
    (["a"] * limits.QUERY_PROMPTS_MAX, ("a",) * limits.QUERY_PROMPTS_MAX),
    ([0] * limits.TOKENS_MAX, ((0,) * limits.TOKENS_MAX,)),
]


@pytest.mark.parametrize(("prompt", "prompts"), PROMPTS)
def test_a_prompt_has_one_of_four_forms(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_token_ids_stand_for_the_prompt_on_both_routes() -> None:
    assert completion(prompt_token_ids=[5, 6]).prompts == ((5, 6),)
    assert completion(prompt=None, prompt_token_ids=[5, 6]).prompts == ((5, 6),)
    assert chat(prompt_token_ids=[5, 6]).prompts == ((5, 6),)
    query = chat(prompt_token_ids=[5], messages=[])
    assert (query.prompts, query.messages, query.is_chat) == (((5,),), (), True)


def test_a_chat_has_messages_and_tools_as_templates_expect_them() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "user", "content": "Weather?", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    ]
    query = chat(messages=messages, tools=[WEATHER], logprobs=True, top_logprobs=1, max_completion_tokens=9)
    read = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert query.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?", "name": "Ann"},
        {"role": "assistant", "content": "", "tool_calls": [read]},
        {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    )
    assert query.tools == (WEATHER,)
    assert (query.logprobs, query.max_tokens, query.tool_choice, query.reads_calls) == (True, 9, "auto", True)
    assert not chat(tools=[WEATHER], tool_choice="none").reads_calls
    assert not chat(tools=[]).reads_calls


NEUTRAL: dict[str, Any] = {
    "top_p": 1.0, "top_k": -1, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1,
    "logit_bias": {}, "best_of": 1, "suffix": "", "echo": False, "response_format": {"type": "text"}, "functions": [],
    "modalities": ["text"], "audio": None, "min_tokens": 0, "ignore_eos": False, "metadata": {"a": "b"}, "store": True,
    "parallel_tool_calls": False, "reasoning_effort": "low", "service_tier": "auto", "add_generation_prompt": True,
}  # fmt: skip


def test_a_value_that_changes_nothing_is_accepted() -> None:
    assert completion(**NEUTRAL) == completion()
    assert chat(**NEUTRAL, tool_choice="auto", top_logprobs=0) == chat()


OF_SUITES: dict[str, tuple[Any, dict[str, Any]]] = {
    "lm-eval, completions": (completion, {"max_tokens": 256, "temperature": 0, "stop": ["\n"], "seed": 1234}),
    "lm-eval, chat": (chat, {"max_tokens": 256, "temperature": 0, "stop": [], "seed": 1234, "top_p": 1.0}),
    "inspect-ai": (
        chat,
        {"max_tokens": 256, "temperature": 0.0, "stop": ["\n"], "n": 1, "logprobs": False, "reasoning_effort": "low",
         "stream": True, "stream_options": {"include_usage": True}, "parallel_tool_calls": True, "user": "u"},
    ),
    "lighteval, by litellm": (
        chat,
        {"max_tokens": 256, "max_completion_tokens": 256, "temperature": 0, "stop": [], "n": 1, "logprobs": False,
         "response_format": {"type": "text"}, "top_p": 1, "frequency_penalty": 0, "repetition_penalty": 1.0},
    ),
}  # fmt: skip
"""Fields that the suites of docs/endpoint.md send."""


@pytest.mark.parametrize("suite", OF_SUITES)
def test_the_fields_that_evaluation_suites_send_are_accepted(suite: str) -> None:
    read, fields = OF_SUITES[suite]
    found = read(**fields)
    assert (found.max_tokens, found.temperature, found.n) == (256, 0.0, 1)


def test_the_refusal_of_echo_says_which_tasks_need_it() -> None:
    with pytest.raises(FieldRefused, match=r"^echo is true\. Only false is offered; .*likelihoods of answers"):
        completion(echo=True, logprobs=1)


@pytest.mark.parametrize(
    ("name", "version"),
    [("swarm@3", 3), ("swarm@0", 0), ("swarm", None), ("swarm@", None), ("swarm@-1", None), ("swarm@1.0", None),
     ("swarm@٣", None), ("other@3", None), ("swarm@" + "9" * 19, None)],
)  # fmt: skip
def test_the_name_of_a_model_has_its_version(name: str, version: int | None) -> None:
    assert model_version(name) == version


REFUSED: dict[str, Any] = {
    "top_p": 0.9, "top_k": 40, "min_p": 0.1, "frequency_penalty": 0.5, "presence_penalty": -1,
    "repetition_penalty": 1.1, "logit_bias": {"50": 1}, "best_of": 2, "suffix": "x", "echo": True,
    "response_format": {"type": "json_object"}, "functions": [{"name": "f"}], "modalities": ["text", "audio"],
    "audio": {"voice": "alloy"}, "ignore_eos": True, "stop_token_ids": [5], "n": limits.SAMPLES_MAX + 1,
    "temperature": 2.5, "seed": 2**63, "max_tokens": limits.TOKENS_MAX + 1, "chat_template": "{{ x }}",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("read", [completion, chat])
def test_a_value_that_would_change_the_distribution_is_refused_by_name(read: Any, name: str) -> None:
    with pytest.raises(FieldRefused, match=f"^{name} is ") as refused:
        read(**{name: REFUSED[name]})
    assert refused.value.breach.field == name
    assert refused.value.hint


def test_a_refusal_names_the_value_that_is_allowed() -> None:
    with pytest.raises(FieldRefused) as refused:
        completion(top_p=0.9)
    assert str(refused.value) == "top_p is 0.9. Only 1 is offered."
    with pytest.raises(FieldRefused, match=r"n is 0\. It must be from 1 to 64\."):
        completion(n=0)


UNKNOWN = [
    ("temprature", "Did you mean temperature?"),
    ("max_token", "Did you mean max_tokens?"),
    ("xyzzy", "Leave it out."),
    ("messages", "Only the route /v1/chat/completions has it."),
    ("k" * 10**6, "Leave it out."),
]


@pytest.mark.parametrize(("name", "hint"), UNKNOWN, ids=[name[:10] for name, _ in UNKNOWN])
def test_an_unknown_field_is_refused_with_the_nearest_name(name: str, hint: str) -> None:
    with pytest.raises(FieldRefused, match="There is no field") as refused:
        completion(**{name: 1})
    assert refused.value.hint == hint
    assert len(refused.value.breach.field) <= 64


WRONG: list[tuple[dict[str, Any], type[SwarmError], str]] = [
    ({"model": 5}, MalformedMessage, "model"),
    ({"model": None}, MalformedMessage, "model"),
    ({"prompt": None}, MalformedMessage, "prompt"),
    ({"prompt": ""}, MalformedMessage, "prompt"),
    ({"prompt": []}, MalformedMessage, "prompt"),
    ({"prompt": {}}, MalformedMessage, "prompt"),
    ({"prompt": [[]]}, MalformedMessage, "prompt[0]"),
    ({"prompt": ["a", ""]}, MalformedMessage, "prompt[1]"),
    ({"prompt": ["a", 1]}, MalformedMessage, "prompt[1]"),
    ({"prompt": [True]}, MalformedMessage, "prompt[0]"),
    ({"prompt": [1, True]}, MalformedMessage, "prompt[1]"),
    ({"prompt": [1, -1]}, MalformedMessage, "prompt[1]"),
    ({"prompt": [1, 1.0]}, MalformedMessage, "prompt[1]"),
    ({"prompt": [1, 10**4000]}, MalformedMessage, "prompt[1]"),
    ({"prompt": [[1], [2, "x"]]}, MalformedMessage, "prompt[1][1]"),
    ({"prompt": [0] * (limits.TOKENS_MAX + 1)}, MessageTooLarge, "prompt"),
    ({"prompt": ["a"] * (limits.QUERY_PROMPTS_MAX + 1)}, MessageTooLarge, "prompt"),
    ({"prompt_token_ids": []}, MalformedMessage, "prompt_token_ids"),
    ({"prompt_token_ids": "1"}, MalformedMessage, "prompt_token_ids"),
    ({"prompt_token_ids": [[1]]}, MalformedMessage, "prompt_token_ids[0]"),
    ({"n": True}, MalformedMessage, "n"),
    ({"n": "4"}, MalformedMessage, "n"),
    ({"n": 1.0}, MalformedMessage, "n"),
    ({"n": 0}, FieldRefused, "n"),
    ({"n": -(10**400)}, FieldRefused, "n"),
    ({"max_tokens": 0}, FieldRefused, "max_tokens"),
    ({"temperature": False}, MalformedMessage, "temperature"),
    ({"temperature": "0"}, MalformedMessage, "temperature"),
    ({"temperature": -0.1}, FieldRefused, "temperature"),
    ({"temperature": -1}, FieldRefused, "temperature"),
    ({"temperature": 3}, FieldRefused, "temperature"),
    ({"temperature": 10**400}, FieldRefused, "temperature"),
    ({"logprobs": True}, MalformedMessage, "logprobs"),
    ({"logprobs": 2}, FieldRefused, "logprobs"),
    ({"stream": 1}, MalformedMessage, "stream"),
    ({"stream_options": []}, MalformedMessage, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, MalformedMessage, "stream_options.include_usage"),
    ({"stream_options": {"include_usages": True}}, FieldRefused, "stream_options.include_usages"),
    ({"stop": ""}, MalformedMessage, "stop"),
    ({"stop": 5}, MalformedMessage, "stop"),
    ({"stop": ["a", None]}, MalformedMessage, "stop"),
    ({"stop": ["a"] * 10**4}, MessageTooLarge, "stop"),
    ({"stop": ["a"] * 10**6}, MessageTooLarge, ""),
    ({"stop": "a" * (limits.STOP_MAX_CHARS + 1)}, MessageTooLarge, "stop"),
    ({"top_p": True}, FieldRefused, "top_p"),
    ({"echo": 0}, FieldRefused, "echo"),
]


@pytest.mark.parametrize(("fields", "kind", "name"), WRONG, ids=[f"{number}" for number in range(len(WRONG))])
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], kind: type[SwarmError], name: str) -> None:
    with pytest.raises(SwarmError) as refused:
        completion(**fields)
    assert (type(refused.value), refused.value.breach.field) == (kind, name)
    assert len(str(refused.value)) < 400


def called(**function: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", **function}}]}]}


def tool(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


ARGUMENTS = "messages[0].tool_calls[0].function.arguments"
PARAMETERS = "tools[0].function.parameters"
WRONG_CHATS: list[tuple[dict[str, Any], type[SwarmError], str]] = [
    ({"messages": None}, MalformedMessage, "messages"),
    ({"messages": []}, MalformedMessage, "messages"),
    ({"messages": "Hi"}, MalformedMessage, "messages"),
    ({"messages": ["Hi"]}, MalformedMessage, "messages[0]"),
    ({"messages": [USER] * (limits.QUERY_MESSAGES_MAX + 1)}, MessageTooLarge, "messages"),
    ({"messages": [USER, {"content": "x"}]}, MalformedMessage, "messages[1].role"),
    ({"messages": [{"role": ["user"], "content": "x"}]}, MalformedMessage, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, MalformedMessage, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, MalformedMessage, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, MalformedMessage, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, FieldRefused, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, MalformedMessage, "messages[0].content[0].text"),
    ({"messages": [{**USER, "contents": "x"}]}, FieldRefused, "messages[0].contents"),
    ({"messages": [{**USER, "name": 5}]}, MalformedMessage, "messages[0].name"),
    ({"messages": [{**USER, "audio": {"id": "a"}}]}, FieldRefused, "messages[0].audio"),
    ({"messages": [{**USER, "tool_calls": [{"function": {"name": "f"}}]}]}, MalformedMessage, ARGUMENTS),
    (called(arguments="{"), MalformedMessage, ARGUMENTS),
    (called(arguments="[1]"), MalformedMessage, ARGUMENTS),
    (called(arguments='{"a": NaN}'), MalformedMessage, ARGUMENTS),
    (called(arguments="[" * 10**5), MessageTooLarge, ARGUMENTS),
    (called(arguments={}, name=""), MalformedMessage, "messages[0].tool_calls[0].function.name"),
    ({"tools": {}}, MalformedMessage, "tools"),
    ({"tools": ["f"]}, MalformedMessage, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, FieldRefused, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, MalformedMessage, "tools[0].function"),
    ({"tools": tool()["tools"] * 2}, FieldRefused, "tools[1].function.name"),
    ({"tools": tool()["tools"] * (limits.QUERY_TOOLS_MAX + 1)}, MessageTooLarge, "tools"),
    (tool(name=5), MalformedMessage, "tools[0].function.name"),
    (tool(strict=True), FieldRefused, "tools[0].function.strict"),
    (tool(parameters=[1]), MalformedMessage, PARAMETERS),
    (tool(parameters={"properties": 5}), MalformedMessage, PARAMETERS),
    (tool(parameters={"properties": {"a": 5}}), MalformedMessage, PARAMETERS),
    ({"tool_choice": "required"}, FieldRefused, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, FieldRefused, "tool_choice"),
    ({"logprobs": 1}, MalformedMessage, "logprobs"),
    ({"top_logprobs": 2}, FieldRefused, "top_logprobs"),
    ({"prompt": "Hi"}, FieldRefused, "prompt"),
]


@pytest.mark.parametrize(("fields", "kind", "name"), WRONG_CHATS, ids=[f"{n}" for n in range(len(WRONG_CHATS))])
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, Any], kind: type[SwarmError], name: str) -> None:
    with pytest.raises(SwarmError) as refused:
        chat(**fields)
    assert (type(refused.value), refused.value.breach.field) == (kind, name)


def test_calls_of_another_role_are_refused() -> None:
    with pytest.raises(FieldRefused, match="Only messages of the role assistant have calls"):
        chat(messages=[{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}])


START = b'{"model": "m", "prompt": '
BODIES = {
    "nothing": (b"", MalformedMessage, "not JSON"),
    "not UTF-8": (START + b'"\xff"}', MalformedMessage, "not UTF-8 at byte 26"),
    "UTF-16": (json.dumps({"model": "m"}).encode("utf-16"), MalformedMessage, "not UTF-8"),
    "half": (START, MalformedMessage, "not JSON"),
    "a list": (b"[]", MalformedMessage, "a list, not a JSON object"),
    "a text": (b'"x"', MalformedMessage, "not a JSON object"),
    "NaN": (START + b'"x", "temperature": NaN}', MalformedMessage, "NaN is no number"),
    "minus infinity": (START + b'"x", "temperature": -Infinity}', MalformedMessage, "-Infinity is no number"),
    "a large exponent": (START + b'"x", "metadata": {"a": [1e999]}}', MalformedMessage, "a number is too large"),
    "digits": (START + b'"x", "n": ' + b"9" * 10**5 + b"}", MalformedMessage, "too many digits"),
    "digits of a fraction": (START + b'"x", "n": 0.' + b"9" * 10**5 + b"}", MalformedMessage, "n must be an integer"),
    "nesting": (START + b"[" * 10**5, MessageTooLarge, "more than 32 deep"),
    "nesting that ends": (START + b"[" * 32 + b"]" * 32 + b"}", MessageTooLarge, "more than 32 deep"),
    "nested objects": (b'{"a":' * 10**5, MessageTooLarge, "more than 32 deep"),
    "half of a pair": (START + rb'"\ud83d"}', MalformedMessage, "half of a surrogate pair"),
    "a key twice": (START + b'"x", "n": 1, "n": 2}', MalformedMessage, "twice"),
    "a long list": (START + b"[" + b"1," * 2 * 10**6 + b"1]}", MessageTooLarge, "2,000,001, and the limit is 32,768"),
    "many texts": (START + b"[" + b'"a",' * 10**4 + b'"a"]}', MessageTooLarge, "the limit is 64 prompts"),
    "many lists": (START + b"[" + b"[]," * 10**6 + b"[]]}", MessageTooLarge, "the limit is 100,000 values"),
    "many objects": (START + b"[" + b"{}," * 10**6 + b"{}]}", MessageTooLarge, "the limit is 100,000 values"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused(name: str) -> None:
    body, kind, text = BODIES[name]
    with pytest.raises(kind, match=text):
        read_completion(body)


def test_nesting_up_to_the_limit_is_read() -> None:
    inner: Any = []
    for _ in range(limits.QUERY_MAX_DEPTH - 3):
        inner = [inner]
    assert completion(metadata={"a": inner}) == completion()
    with pytest.raises(MessageTooLarge):
        completion(metadata={"a": [inner]})


SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
NAMES = st.sampled_from(
    ["model", "prompt", "messages", "tools", "n", "stop", "logprobs", "stream", "stream_options", "best_of", "seed",
     "tool_choice", "temperature", "top_p", "prompt_token_ids", "logit_bias", "response_format", "role", "content",
     "function", "type", "name", "parameters", "properties", "tool_calls", "arguments"]
)  # fmt: skip
OBJECTS = st.recursive(
    st.dictionaries(NAMES, VALUES, max_size=4),
    lambda inner: st.dictionaries(NAMES, inner | st.lists(inner, max_size=2) | VALUES, max_size=4),
)


@given(OBJECTS)
def test_any_json_gives_a_query_or_a_named_error(value: dict[str, Any]) -> None:
    whole = {"model": "m", "messages": [USER], "prompt": "Hi"} | value
    for read in (read_completion, read_chat):
        for left_out in ("messages", "prompt"):
            body = json.dumps({name: each for name, each in whole.items() if name != left_out}).encode()
            try:
                read(body)
            except (FieldRefused, MalformedMessage, MessageTooLarge) as error:
                assert len(str(error)) < 1_000  # noqa: PT017  # a query is right, too


@given(st.binary(max_size=200))
def test_any_bytes_give_a_named_error(body: bytes) -> None:
    with pytest.raises((MalformedMessage, MessageTooLarge, FieldRefused)):
        read_completion(body)
