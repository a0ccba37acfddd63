"""Reply bodies of the endpoint: OpenAI's forms, our extensions, and calls of tools.

The forms are written out from the public reference of the API: the fields that every client may read, with their types.
"""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.endpoint.replies import (
    STREAM_END,
    ReplyHead,
    SampleReply,
    ServedModel,
    as_event,
    as_json,
    error_reply,
    first_chunk,
    model_list,
    next_chunk,
    usage_chunk,
    whole_reply,
)
from coordinator.endpoint.requests import CompletionQuery
from coordinator.endpoint.sample_stream import TextStream
from protocol import errors
from protocol.breach import Breach
from tests.coordinator.endpoint.vocabularies import END, TEXT, byte_pairs, token_texts

CODEC = byte_pairs()
HEAD = ReplyHead("cmpl-1", 1_700_000_000, "m", 7)
PROMPT = (5, 6, 7)
TOOLS = ({"type": "function", "function": {"name": "weather", "description": "", "parameters": {}}},)
CHAT = CompletionQuery("m", messages=({"role": "user", "content": "Hi"},), is_chat=True)
CALLING = CompletionQuery("m", messages=CHAT.messages, is_chat=True, tools=TOOLS, tool_choice="auto")
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Zürich"}}</tool_call>'

USAGE = {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int}
FORMS: dict[str, dict[str, Any]] = {
    "text_completion": {
        "choices": [
            {
                "index": int,
                "text": str,
                "finish_reason": (str, None),
                "logprobs": ({"tokens": [str], "token_logprobs": [float], "text_offset": [int]}, None),
            }
        ],
    },
    "chat.completion": {
        "choices": [
            {
                "index": int,
                "finish_reason": str,
                "message": {"role": str, "content": (str, None), "refusal": None},
                "logprobs": ({"content": [{"token": str, "logprob": float, "bytes": [int], "top_logprobs": []}]}, None),
            }
        ],
    },
    "chat.completion.chunk": {"choices": [{"index": int, "finish_reason": (str, None), "delta": {}}]},
}
BODY = {"id": str, "object": str, "created": int, "model": str}


def require_form(value: Any, form: Any) -> None:
    """Require that a value has a form: a type, None, a list of one form, fields, or one of several forms."""
    if isinstance(form, tuple):
        require_form(value, None if value is None else form[0])
    elif isinstance(form, type) or form is None:
        assert type(value) is (form or type(None)), (value, form)
    elif isinstance(form, list):
        assert isinstance(value, list)
        for each in value:
            require_form(each, form[0])
    else:
        assert form.keys() <= value.keys()
        for name, inner in form.items():
            require_form(value[name], inner)


def require_body(body: dict[str, Any]) -> None:
    """Require the form of a whole body or a chunk, and that it is JSON."""
    require_form(body, BODY | FORMS[body["object"]])
    assert json.loads(as_json(body)) == body


def sample(text: str, /, **fields: Any) -> SampleReply:
    tokens = [*CODEC.encode(text), END]
    logprobs = [-0.5 * place for place in range(len(tokens))]
    stream = TextStream(CODEC.decode, (), {END})
    made: dict[str, Any] = {"logprobs": logprobs, "text": stream.push(tokens), "finish": "stop"}
    return SampleReply(tokens, **made | {"token_texts": token_texts(CODEC.decode, tokens)} | fields)


def test_a_completion_has_choices_in_the_order_of_prompts_and_samples() -> None:
    query = CompletionQuery("m", ("a", "b"), n=2)
    samples = [sample(text, receipt=f"r{text}") for text in "wxyz"]
    body = whole_reply(HEAD, query, [(1, 2), (3,)], samples)
    require_body(body)
    assert body == {
        "id": "cmpl-1", "object": "text_completion", "created": 1_700_000_000, "model": "m", "version": 7,
        "choices": [
            {"index": number, "text": text, "logprobs": None, "finish_reason": "stop", "receipt": f"r{text}"}
            for number, text in enumerate("wxyz")
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11},
    }  # fmt: skip


def test_a_chat_has_messages() -> None:
    body = whole_reply(HEAD, CHAT, [PROMPT], [sample("Hello")])
    require_body(body)
    assert body["object"] == "chat.completion"
    assert body["choices"] == [
        {
            "index": 0, "message": {"role": "assistant", "content": "Hello", "refusal": None}, "logprobs": None,
            "finish_reason": "stop", "receipt": "",
        }
    ]  # fmt: skip


def test_token_ids_come_only_if_the_query_asks_for_them() -> None:
    made = sample("Hello")
    for is_chat in (False, True):
        plain, asked = (
            CompletionQuery("m", (PROMPT,), is_chat=is_chat, return_token_ids=returned) for returned in (False, True)
        )
        assert b"token_ids" not in as_json(whole_reply(HEAD, plain, [PROMPT], [made]))
        body = whole_reply(HEAD, asked, [PROMPT], [made])
        assert body["choices"][0]["token_ids"] == made.tokens
        assert (body if is_chat else body["choices"][0])["prompt_token_ids"] == [5, 6, 7]


def test_each_prompt_comes_with_its_own_choices() -> None:
    query = CompletionQuery("m", ("a", "b"), n=2, return_token_ids=True)
    body = whole_reply(HEAD, query, [(1, 2), (3,)], [sample(text) for text in "wxyz"])
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[1, 2], [1, 2], [3], [3]]


@given(st.lists(st.sampled_from([*TEXT.split(), " ", "🙂", "é"]), max_size=20).map("".join), st.integers(0, 30))
def test_the_texts_and_bytes_of_tokens_are_the_text(text: str, kept_chars: int) -> None:
    whole = sample(text)
    cut = sample(text, text=text[:kept_chars])
    for made in (whole, cut):
        body = whole_reply(HEAD, CompletionQuery("m", (PROMPT,), logprobs=True), [PROMPT], [made])
        require_body(body)
        logprobs = body["choices"][0]["logprobs"]
        assert "".join(logprobs["tokens"]) == text + "<|end|>"
        assert logprobs["token_logprobs"] == made.logprobs
        assert len(logprobs["text_offset"]) == len(made.tokens)
        for token, start in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert f"{text}<|end|>"[start:].startswith(token)
            assert token.startswith(made.text[start : start + len(token)])
    body = whole_reply(HEAD, CompletionQuery("m", (PROMPT,), is_chat=True, logprobs=True), [PROMPT], [whole])
    require_body(body)
    content = body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(each["bytes"]) for each in content).decode() == text + "<|end|>"
    assert [each["logprob"] for each in content] == whole.logprobs


def test_a_call_of_a_tool_is_read_from_the_text() -> None:
    body = whole_reply(HEAD, CALLING, [PROMPT], [sample(f"Let me see. {CALL}"), sample(CALL)])
    require_body(body)
    first, second = (choice["message"] for choice in body["choices"])
    assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls"] * 2
    assert (first["content"], second["content"]) == ("Let me see.", None)
    (call,) = first["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert call["function"]["arguments"] == '{"city": "Zürich"}'
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    assert call["id"] != second["tool_calls"][0]["id"]


@pytest.mark.parametrize(
    "text",
    [CALL.replace("{", ""), CALL.replace("weather", "delete"), f"{CALL}<tool_call>{{"],
)
def test_an_unreadable_call_stays_text(text: str) -> None:
    (choice,) = whole_reply(HEAD, CALLING, [PROMPT], [sample(text)])["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_call_is_text_if_the_query_has_no_tools_or_wants_no_calls() -> None:
    unwanted = CompletionQuery("m", messages=CHAT.messages, is_chat=True, tools=TOOLS, tool_choice="none")
    for query in (CHAT, unwanted):
        (choice,) = whole_reply(HEAD, query, [PROMPT], [sample(CALL)])["choices"]
        assert choice["message"]["content"] == CALL


def test_a_sample_that_was_cut_off_says_so_beside_its_calls() -> None:
    (choice,) = whole_reply(HEAD, CALLING, [PROMPT], [sample(CALL, finish="length")])["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"]


def test_the_chunks_of_a_chat_are_its_text() -> None:
    query = CompletionQuery("m", is_chat=True, stream=True, include_usage=True, return_token_ids=True, logprobs=True)
    whole = sample("Hello, 🙂!")
    stream, chunks = TextStream(CODEC.decode, (), {END}), [first_chunk(HEAD, query, 0, PROMPT)]
    for place, token in enumerate(whole.tokens):
        text = stream.push([token])
        finish = stream.end.finish if stream.end else None
        part = SampleReply([token], [whole.logprobs[place]], text, finish, "r", [whole.token_texts[place]])
        chunks.append(next_chunk(HEAD, query, 0, part))
    chunks.append(usage_chunk(HEAD, query, [PROMPT], len(whole.tokens)))
    for chunk in chunks:
        require_body(chunk)
        assert chunk["version"] == 7
    first, *middle, last = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[5, 6, 7], *[None] * (len(chunks) - 1)]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "Hello, 🙂!"
    assert [token for chunk in middle for token in chunk["choices"][0]["token_ids"]] == whole.tokens
    assert [chunk["choices"][0]["finish_reason"] for chunk in middle] == [*[None] * (len(middle) - 1), "stop"]
    assert [chunk["usage"] for chunk in (first, *middle)] == [None] * (len(chunks) - 1)
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 3 + len(whole.tokens))


def test_the_chunks_of_a_completion_are_its_text() -> None:
    query = CompletionQuery("m", (PROMPT,), stream=True, return_token_ids=True, logprobs=True)
    whole = sample("Hello you")
    parts = [
        SampleReply(whole.tokens[:1], whole.logprobs[:1], "Hello", None, "", whole.token_texts[:1]),
        SampleReply(whole.tokens[1:], whole.logprobs[1:], " you", "stop", "r", whole.token_texts[1:], offset_chars=5),
    ]
    chunks = [first_chunk(HEAD, query, 3, PROMPT), *(next_chunk(HEAD, query, 3, part) for part in parts)]
    for chunk in chunks:
        require_body(chunk)
        assert "usage" not in chunk
        assert chunk["choices"][0]["index"] == 3
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello you"
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks] == [[5, 6, 7], None, None]
    offsets = [start for chunk in chunks for start in chunk["choices"][0]["logprobs"]["text_offset"]]
    (choice,) = whole_reply(HEAD, query, [PROMPT], [whole])["choices"]
    assert offsets == choice["logprobs"]["text_offset"]


def test_a_stream_sends_calls_in_one_piece() -> None:
    delta = next_chunk(HEAD, CALLING, 0, sample(CALL))["choices"][0]["delta"]
    (call,) = delta["tool_calls"]
    assert (delta["content"], call["index"], call["function"]["name"]) == (None, 0, "weather")


def test_a_number_that_json_does_not_have_is_not_sent() -> None:
    made = sample("Hello", logprobs=[math.nan] * len(sample("Hello").tokens))
    body = whole_reply(HEAD, CompletionQuery("m", (PROMPT,), logprobs=True), [PROMPT], [made])
    with pytest.raises(ValueError, match="JSON compliant"):
        as_json(body)


def test_an_event_is_one_line_of_data() -> None:
    body = whole_reply(HEAD, CHAT, [PROMPT], [sample("a\n\ndata: x\r\n\x85\u2028")])
    event = as_event(body)
    assert event.startswith(b"data: {")
    assert event.index(b"\n") == len(event) - 2
    assert b"\r" not in event
    assert STREAM_END == b"data: [DONE]\n\n"


def test_the_list_of_models_names_their_versions() -> None:
    body = model_list([ServedModel("m", 1_700_000_000, 7, 4096)])
    require_form(body, {"object": str, "data": [{"id": str, "object": str, "created": int, "owned_by": str}]})
    assert (body["data"][0]["id"], body["data"][0]["version"], body["data"][0]["max_model_len"]) == ("m", 7, 4096)


ERRORS = [
    (errors.FieldRefused("top_p is 0.9.", hint="Only 1 is offered.", breach=Breach("top_p")), 400, "invalid_request"),
    (errors.MalformedMessage("The body is not JSON."), 400, "invalid_request"),
    (errors.MessageTooLarge("stop is too large."), 413, "invalid_request"),
    (errors.NotFound("There is no model x."), 404, "invalid_request"),
    (errors.NotAuthorised("The key is wrong."), 401, "authentication"),
    (errors.BudgetExhausted("The budget is spent."), 402, "insufficient_quota"),
    (errors.TooManyStatements("Wait."), 429, "rate_limit"),
    (errors.Overloaded("Wait."), 503, "server"),
    (errors.SwarmError("An internal error."), 500, "server"),
]


@pytest.mark.parametrize(("error", "status", "kind"), ERRORS, ids=[error.code for error, *_ in ERRORS])
def test_an_error_has_our_code_and_openais_type(error: errors.SwarmError, status: int, kind: str) -> None:
    sent, body = error_reply(error)
    kind = kind if kind == "insufficient_quota" else f"{kind}_error"
    assert sent == status
    named = error.breach.field or None
    assert body == {"error": {"message": str(error), "type": kind, "param": named, "code": error.code}}
