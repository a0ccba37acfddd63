"""Reply bodies of the endpoint in OpenAI's forms: completions, chats, chunks of streams, models and errors.

- A choice carries `receipt`, and each body `version`: everybody can verify who sampled it with which weights.
- With `return_token_ids`, a choice carries `token_ids`, and its prompt comes as `prompt_token_ids`: in the body of a
  chat, in the choice of a completion, and in a stream with the first chunk only.
- The choices of the prompt number p are p · n, p · n + 1, …
- Calls of tools are read from the text of a whole sample. If one of them cannot be read, all of it stays text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import accumulate
from typing import Any, Literal

from coordinator.endpoint.requests import CompletionQuery
from coordinator.environments.tool_calls import Turn, parse
from protocol.errors import SwarmError

CALL_ID_CHARS = 9
"""Characters of a call's id: the templates of the Mistral family require nine, letters and digits only."""

STREAM_END = b"data: [DONE]\n\n"
"""The last event of a stream."""

_ERROR_TYPES = {401: "authentication_error", 402: "insufficient_quota", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """The fields that all bodies of one reply share."""

    id: str
    created_s: int
    model: str
    version: int


@dataclass(frozen=True, slots=True)
class SampleReply:
    """A sample, or the next part of one in a stream."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    text: str
    """The text to send: without the end token, and cut at a stop string."""
    finish: Literal["stop", "length", "tool_calls"] | None = None
    """None for a part that is not the last one."""
    receipt: str = ""
    token_texts: Sequence[str] = ()
    """The text that each token adds, as a `DecodeWindow` returns it, for log-probabilities."""
    offset_chars: int = 0
    """The characters in the `token_texts` of all parts before this one."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the endpoint serves."""

    name: str
    created_s: int
    version: int
    context_tokens: int | None = None
    """The most tokens of a prompt and its completion together."""


def whole_reply(
    head: ReplyHead, query: CompletionQuery, prompts: Sequence[Sequence[int]], samples: Sequence[SampleReply]
) -> dict[str, Any]:
    """Return the body that answers a query: `prompts` are its token ids, `samples` those of all prompts in order."""
    choices = [
        _chat_choice(head, query, index, sample)
        if query.is_chat
        else _choice(query, index, sample, prompts[index // query.n])
        for index, sample in enumerate(samples)
    ]
    body = _body(head, "chat.completion" if query.is_chat else "text_completion", choices)
    if query.is_chat and query.return_token_ids:
        body["prompt_token_ids"] = list(prompts[0])
    return body | {"usage": _usage(prompts, sum(len(sample.tokens) for sample in samples))}


def first_chunk(head: ReplyHead, query: CompletionQuery, index: int, prompt: Sequence[int]) -> dict[str, Any]:
    """Return the chunk that begins a choice: in a chat, it has the role; it has the prompt if the query asks for it."""
    if not query.is_chat:
        return _chunk(head, query, [_choice(query, index, SampleReply((), (), ""), prompt)])
    delta = {"role": "assistant", "content": ""}
    body = _chunk(head, query, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
    return body | ({"prompt_token_ids": list(prompt)} if query.return_token_ids else {})


def next_chunk(head: ReplyHead, query: CompletionQuery, index: int, part: SampleReply) -> dict[str, Any]:
    """Return the chunk with the next part of a choice; with `reads_calls`, the part must be the whole sample."""
    if not query.is_chat:
        return _chunk(head, query, [_choice(query, index, part)])
    message, finish = _message(head, query, index, part)
    del message["role"], message["refusal"]
    for place, call in enumerate(message.get("tool_calls", ())):
        call["index"] = place
    return _chunk(head, query, [_in_chat(query, index, part, finish) | {"delta": message}])


def usage_chunk(
    head: ReplyHead, query: CompletionQuery, prompts: Sequence[Sequence[int]], completion_tokens: int
) -> dict[str, Any]:
    """Return the last chunk of a stream whose query has `include_usage`: it has no choice."""
    return _chunk(head, query, []) | {"usage": _usage(prompts, completion_tokens)}


def model_list(models: Sequence[ServedModel]) -> dict[str, Any]:
    """Return the body of `/v1/models`."""
    return {"object": "list", "data": [model_entry(model) for model in models]}


def model_entry(model: ServedModel) -> dict[str, Any]:
    """Return one model, as `/v1/models` and `/v1/models/{name}` have it."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_s,
        "owned_by": "echo-swarm",
        "version": model.version,
        "max_model_len": model.context_tokens,
    }


def error_reply(error: SwarmError) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body of an error; its code is ours, its type is OpenAI's."""
    status = error.http_status
    kind = "server_error" if status >= 500 else _ERROR_TYPES.get(status, "invalid_request_error")
    shown = {"message": str(error), "type": kind, "param": error.breach.field or None, "code": error.code}
    return status, {"error": shown}


def as_json(body: Mapping[str, Any]) -> bytes:
    """Return a body as JSON; a number that JSON does not have is an error of ours."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def as_event(body: Mapping[str, Any]) -> bytes:
    """Return a chunk, or an error in the middle of a stream, as one server-sent event."""
    return b"data: " + as_json(body) + b"\n\n"


def _body(head: ReplyHead, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created_s,
        "model": head.model,
        "version": head.version,
        "choices": choices,
    }


def _chunk(head: ReplyHead, query: CompletionQuery, choices: list[dict[str, Any]]) -> dict[str, Any]:
    body = _body(head, "chat.completion.chunk" if query.is_chat else "text_completion", choices)
    return body | ({"usage": None} if query.include_usage else {})


def _usage(prompts: Sequence[Sequence[int]], completion_tokens: int) -> dict[str, int]:
    prompt_tokens = sum(map(len, prompts))
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def _choice(
    query: CompletionQuery, index: int, sample: SampleReply, prompt: Sequence[int] | None = None
) -> dict[str, Any]:
    """Return a choice of a completion."""
    made: dict[str, Any] = {
        "index": index,
        "text": sample.text,
        "logprobs": _logprobs(sample) if query.logprobs else None,
        "finish_reason": sample.finish,
    }
    if query.return_token_ids and prompt is not None:
        made["prompt_token_ids"] = list(prompt)
    return made | _extensions(query, sample)


def _chat_choice(head: ReplyHead, query: CompletionQuery, index: int, sample: SampleReply) -> dict[str, Any]:
    message, finish = _message(head, query, index, sample)
    return _in_chat(query, index, sample, finish) | {"message": message}


def _in_chat(query: CompletionQuery, index: int, sample: SampleReply, finish: str | None) -> dict[str, Any]:
    """Return what a choice of a chat and one of its chunks have in common."""
    logprobs = {"content": _token_logprobs(sample), "refusal": None} if query.logprobs else None
    return {"index": index, "logprobs": logprobs, "finish_reason": finish, **_extensions(query, sample)}


def _extensions(query: CompletionQuery, sample: SampleReply) -> dict[str, Any]:
    """Return the fields of a choice that OpenAI's do not have."""
    tokens = {"token_ids": list(sample.tokens)} if query.return_token_ids else {}
    return {"receipt": sample.receipt, **tokens}


def _message(
    head: ReplyHead, query: CompletionQuery, index: int, sample: SampleReply
) -> tuple[dict[str, Any], str | None]:
    """Return the message of a chat, and why it ended: a sample with calls that ended itself ended for them."""
    turn = parse(sample.text, tools=query.tools) if query.reads_calls else Turn(sample.text)
    message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
    if not turn.calls or turn.errors:
        return message, sample.finish
    message["content"] = turn.content or None
    message["tool_calls"] = [
        {
            "id": sha256(f"{head.id}/{index}/{place}".encode()).hexdigest()[:CALL_ID_CHARS],
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for place, call in enumerate(turn.calls)
    ]
    return message, "tool_calls" if sample.finish == "stop" else sample.finish


def _logprobs(sample: SampleReply) -> dict[str, Any]:
    """Return log-probabilities as a completion has them; tokens of a stop string begin at the end of the text."""
    starts = accumulate(map(len, sample.token_texts), initial=sample.offset_chars)
    return {
        "tokens": list(sample.token_texts),
        "token_logprobs": [float(value) for value in sample.logprobs],
        "top_logprobs": None,
        "text_offset": [start for start, _ in zip(starts, sample.token_texts, strict=False)],
    }


def _token_logprobs(sample: SampleReply) -> list[dict[str, Any]]:
    """Return log-probabilities as a chat has them; the bytes of all tokens together are the text."""
    return [
        {"token": text, "logprob": float(value), "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(sample.token_texts, sample.logprobs, strict=True)
    ]
