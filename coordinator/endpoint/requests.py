"""Queries of the endpoint, read from the JSON body of a request.

    read_completion   /v1/completions        prompts as text or token ids
    read_chat         /v1/chat/completions   messages and tools

- Untrusted: any bytes give a query or an error that names the field (`error.breach.field`). The caller has limited the
  size of the body.
- A sample is drawn with the policy's own distribution from a seed, so that an auditor can repeat the draw. Only a
  temperature may change the distribution. Another field that would is refused by its name, except with the value that
  changes nothing.
- A field that changes nothing about the samples is ignored. An unknown field is refused with the nearest name.
- A field that is null counts as absent.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, NoReturn

from protocol import limits
from protocol.breach import Breach
from protocol.errors import FieldRefused, MalformedMessage, MessageTooLarge, SwarmError
from protocol.tasks import ROLES
from protocol.text.plain import one_line

MODEL = "swarm"
"""The name of the model: any version. `swarm@12` is version 12."""

PRIORITY_MAX = 1_000_000
"""The highest and, negative, the lowest priority of a query."""

Prompt = str | tuple[int, ...]
"""A prompt as text, or as the ids of its tokens."""


@dataclass(frozen=True, slots=True)
class CompletionQuery:
    """A request for `n` samples of each prompt."""

    model: str
    prompts: tuple[Prompt, ...] = ()
    """The prompts as text or token ids; empty if the prompt is `messages`."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """The messages of a chat as a chat template expects them; `prompts` has the prompt if both are set."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools of a chat, for the template."""
    is_chat: bool = False
    n: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    seed: int | None = None
    stream: bool = False
    include_usage: bool = False
    """True if a stream ends with a chunk that has the number of tokens."""
    return_token_ids: bool = False
    priority: int = 0
    """The place among the waiting queries of the same key: the lowest is first, as in vLLM."""
    max_price_micros_per_mtok: int | None = None
    """The highest price of a node that may answer."""
    tool_choice: Literal["none", "auto"] = "none"

    @property
    def reads_calls(self) -> bool:
        """Return True if calls of tools are read from the samples: a stream sends such a sample in one piece."""
        return bool(self.tools) and self.tool_choice == "auto"

    @property
    def grows(self) -> bool:
        """Return True if the samples are sent while they are sampled."""
        return self.stream and not self.reads_calls


def model_version(name: str) -> int | None:
    """Return the version that the name of a model asks for; None if it asks for none, or is not ours."""
    model, _, number = name.partition("@")
    known = model == MODEL and number.isascii() and number.isdigit() and len(number) <= VERSION_MAX_DIGITS
    return int(number) if known else None


VERSION_MAX_DIGITS = 18
"""Digits of a version, which the store keeps in 64 bits."""


def read_completion(body: bytes) -> CompletionQuery:
    """Return the query in the body of a request to `/v1/completions`."""
    fields = _Fields(_decoded(body), _COMPLETION, _CHAT)
    logprobs = fields.integer("logprobs", 0, 1)
    tokens = fields.token_ids("prompt_token_ids")
    prompts = _prompts(fields.get("prompt"), is_required=tokens is None)
    return CompletionQuery(
        prompts=prompts if tokens is None else (tokens,), logprobs=logprobs is not None, **_common(fields)
    )


def read_chat(body: bytes) -> CompletionQuery:
    """Return the query in the body of a request to `/v1/chat/completions`."""
    fields = _Fields(_decoded(body), _CHAT, _COMPLETION)
    tokens = fields.token_ids("prompt_token_ids")
    fields.integer("top_logprobs", 0, 1)
    tools = read_tools(fields.get("tools"))
    choice = fields.get("tool_choice")
    if choice not in (None, "none", "auto"):
        raise _refused("tool_choice", 'only "none" and "auto" are offered', choice)
    return CompletionQuery(
        prompts=() if tokens is None else (tokens,),
        messages=read_messages(fields.get("messages"), is_required=tokens is None),
        tools=tools,
        is_chat=True,
        logprobs=fields.flag("logprobs"),
        tool_choice="auto" if tools and choice != "none" else "none",
        **_common(fields),
    )


def _common(fields: "_Fields") -> dict[str, Any]:
    """Return the fields that both routes have, after a check of those that are not offered."""
    for name, neutral in _NEUTRAL.items():
        fields.neutral(name, neutral)
    n = fields.integer("n", 1, limits.SAMPLES_MAX) or 1
    fields.integer("best_of", 1, n)
    model = fields.text("model")
    if model is None:
        raise _missing("model")
    at_most = [fields.integer(name, 1, limits.TOKENS_MAX) for name in ("max_completion_tokens", "max_tokens")]
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _wrong("stream_options", "an object", options)
    return {
        "model": model,
        "n": n,
        "max_tokens": next((value for value in at_most if value is not None), None),
        "temperature": fields.number("temperature", 0, limits.TEMPERATURE_MAX),
        "stop": _stops(fields.get("stop")),
        "seed": fields.integer("seed", -(2**63), 2**63 - 1),
        "stream": fields.flag("stream"),
        "include_usage": _Fields(options or {}, _STREAM_OPTIONS, within="stream_options.").flag("include_usage"),
        "return_token_ids": fields.flag("return_token_ids"),
        "priority": fields.integer("priority", -PRIORITY_MAX, PRIORITY_MAX) or 0,
        "max_price_micros_per_mtok": fields.integer("max_price_micros_per_mtok", 0, limits.PRICE_MAX_MICROS_PER_MTOK),
    }


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "typical_p": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "use_beam_search": (False,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (False,),
    "spaces_between_special_tokens": (False,),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
}
"""Fields that are not offered, with the values that change nothing; null is always one of them."""

_CONSEQUENCES = dict.fromkeys(
    ("echo", "prompt_logprobs"),
    "; nodes compute no log-probabilities of a prompt, so tasks that compare the likelihoods of answers cannot run",
)
"""Consequences for a caller of fields that are not offered, as the end of a rule."""

_IGNORED = (
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "reasoning_effort", "verbosity", "moderation",
    "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_salt",
    "request_id",
)  # fmt: skip
_COMMON = (
    "model", "priority", "max_price_micros_per_mtok",
    "n", "best_of", "max_tokens", "max_completion_tokens", "temperature", "stop", "seed", "stream",
    "stream_options", "logprobs", "return_token_ids", "prompt_token_ids", *_NEUTRAL, *_IGNORED,
)  # fmt: skip
_COMPLETION = ("prompt", *_COMMON)
_CHAT = ("messages", "tools", "tool_choice", "top_logprobs", *_COMMON)
_STREAM_OPTIONS = ("include_usage", "include_obfuscation")


def _prompts(value: Any, is_required: bool) -> tuple[Prompt, ...]:
    """Return the prompts in one of four forms: a text, texts, the token ids of one prompt, or those of several."""
    if value is None and not is_required:
        return ()
    if value is None:
        raise _missing("prompt")
    if isinstance(value, str):
        return (_prompt("prompt", value),)
    if not isinstance(value, list) or not value:
        raise _wrong("prompt", "a text, a list of texts, a list of token ids, or a list of such lists", value)
    if type(value[0]) is int:
        return (_prompt("prompt", value),)
    if len(value) > limits.QUERY_PROMPTS_MAX:
        raise _too_large("prompt", f"{limits.QUERY_PROMPTS_MAX} prompts", len(value))
    return tuple(_prompt(f"prompt[{number}]", each) for number, each in enumerate(value))


def _prompt(name: str, value: Any) -> Prompt:
    if not value:
        raise _wrong(name, "a text or token ids", value)
    return value if isinstance(value, str) else _token_ids(name, value)


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise _wrong(name, "a list of token ids", value)
    if len(value) > limits.TOKENS_MAX:
        raise _too_large(name, f"{limits.TOKENS_MAX:,} tokens", len(value))
    for place, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= limits.TOKEN_ID_MAX:
            raise _wrong(f"{name}[{place}]", f"an integer from 0 to {limits.TOKEN_ID_MAX}", token)
    return tuple(value)


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if not isinstance(texts, list):
        raise _wrong("stop", "a text or a list of texts", value)
    if len(texts) > limits.STOPS_MAX:
        raise _too_large("stop", f"{limits.STOPS_MAX} stop strings", len(texts))
    for text in texts:
        if not isinstance(text, str) or not text:
            raise _wrong("stop", "a text that is not empty, or a list of such texts", text)
        if len(text) > limits.STOP_MAX_CHARS:
            raise _too_large("stop", f"{limits.STOP_MAX_CHARS} characters in each stop string", len(text))
    return tuple(dict.fromkeys(texts))


_MESSAGE = ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id")
_NOT_IN_MESSAGES = ("refusal", "annotations", "audio", "function_call")
"""Fields that clients copy from a reply: they must be empty."""


def read_messages(value: Any, is_required: bool = True) -> tuple[Mapping[str, Any], ...]:
    """Return the messages of a chat as templates expect them: contents are texts, arguments of calls are objects."""
    if value is None and is_required:
        raise _missing("messages")
    if value is None or (value == [] and not is_required):
        return ()
    if not isinstance(value, list) or not value:
        raise _wrong("messages", "a list of messages", value)
    if len(value) > limits.QUERY_MESSAGES_MAX:
        raise _too_large("messages", f"{limits.QUERY_MESSAGES_MAX:,} messages", len(value))
    return tuple(_message(f"messages[{number}]", each) for number, each in enumerate(value))


def _message(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(name, "an object with role and content", value)
    fields = _Fields(value, (*_MESSAGE, *_NOT_IN_MESSAGES), within=f"{name}.")
    for empty in _NOT_IN_MESSAGES:
        fields.neutral(empty, ([], {}, ""))
    role = fields.get("role")
    if role not in ROLES:
        raise _wrong(f"{name}.role", f"one of {', '.join(ROLES)}", role)
    calls = _calls(f"{name}.tool_calls", fields.get("tool_calls") or [])
    if calls and role != "assistant":
        raise _refused(f"{name}.tool_calls", "only messages of the role assistant have calls", calls)
    content = fields.get("content")
    if content is None and role != "assistant":
        raise _missing(f"{name}.content")
    made = {"role": "system" if role == "developer" else role, "content": _content(f"{name}.content", content)}
    texts = {each: fields.text(each) for each in ("name", "reasoning_content", "tool_call_id")}
    made |= {each: text for each, text in texts.items() if text is not None}
    return made | ({"tool_calls": calls} if calls else {})


def _content(name: str, value: Any) -> str:
    """Return the content of a message as text; parts of text are joined."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise _wrong(name, "a text or a list of parts", value)
    texts = []
    for number, part in enumerate(value):
        if not isinstance(part, dict):
            raise _wrong(f"{name}[{number}]", "an object with type and text", part)
        if part.get("type") != "text":
            raise _refused(f"{name}[{number}].type", 'only "text" is offered', part.get("type"))
        text = _Fields(part, ("type", "text"), within=f"{name}[{number}].").text("text")
        if text is None:
            raise _missing(f"{name}[{number}].text")
        texts.append(text)
    return "".join(texts)


def _calls(name: str, value: Any) -> list[dict[str, Any]]:
    """Return the calls of an earlier turn, with their arguments as objects."""
    if not isinstance(value, list):
        raise _wrong(name, "a list of calls", value)
    calls = []
    for number, each in enumerate(value):
        within = f"{name}[{number}]"
        function = _function(within, each, ("id", "type", "function", "index"), ("name", "arguments"))
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            arguments = _json(arguments or "{}", f"{within}.function.arguments")
        if not isinstance(arguments, dict):
            raise _wrong(f"{within}.function.arguments", "a JSON object, written as a text", arguments)
        call = {"type": "function", "function": {"name": function.get("name"), "arguments": arguments}}
        identifier = _Fields(each, each, within=f"{within}.").text("id")
        calls.append(call if identifier is None else {"id": identifier, **call})
    return calls


def read_tools(value: Any) -> tuple[Mapping[str, Any], ...]:
    """Return the tools of a chat as chat templates expect them; each has a name and the schema of an object."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong("tools", "a list of tools", value)
    if len(value) > limits.QUERY_TOOLS_MAX:
        raise _too_large("tools", f"{limits.QUERY_TOOLS_MAX} tools", len(value))
    tools: dict[str, Mapping[str, Any]] = {}
    for number, each in enumerate(value):
        within = f"tools[{number}]"
        function = _function(within, each, ("type", "function"), ("name", "description", "parameters", "strict"))
        function.neutral("strict", (False,))
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
        if not isinstance(properties, dict) or not all(isinstance(schema, dict) for schema in properties.values()):
            raise _wrong(f"{within}.function.parameters", "the JSON schema of an object", parameters)
        name = str(function.get("name"))
        if name in tools:
            raise _refused(f"{within}.function.name", "another tool has this name", name)
        described = {"name": name, "description": function.text("description") or "", "parameters": parameters}
        tools[name] = {"type": "function", "function": described}
    return tuple(tools.values())


def _function(name: str, value: Any, outer: Sequence[str], inner: Sequence[str]) -> "_Fields":
    """Return the fields of the function in a tool or a call; its name is a text."""
    if not isinstance(value, dict):
        raise _wrong(name, 'an object with type "function"', value)
    fields = _Fields(value, outer, within=f"{name}.")
    fields.neutral("type", ("function",))
    function = fields.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{name}.function", "an object with a name", function)
    made = _Fields(function, inner, within=f"{name}.function.")
    if not made.text("name"):
        raise _missing(f"{name}.function.name")
    return made


class _Fields:
    """The fields of a JSON object, each read as the type that it must have."""

    def __init__(
        self, values: Mapping[str, Any], known: Sequence[str], elsewhere: Sequence[str] = (), *, within: str = ""
    ) -> None:
        self._values, self._within = values, within
        for name in values:
            if name not in known:
                raise _unknown(name, known, elsewhere, within)

    def get(self, name: str) -> Any:
        """Return the value of a field; None if it is absent."""
        return self._values.get(name)

    def flag(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise _wrong(self._within + name, "true or false", value)
        return bool(value)

    def text(self, name: str) -> str | None:
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise _wrong(self._within + name, "a text", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.get(name)
        if value is None or (type(value) is int and low <= value <= high):
            return value
        if type(value) is not int:
            raise _wrong(self._within + name, "an integer", value)
        raise _refused(self._within + name, f"it must be from {low} to {high}", value)

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        if type(value) not in (int, float):
            raise _wrong(self._within + name, "a number", value)
        if not low <= value <= high:
            raise _refused(self._within + name, f"it must be from {low:g} to {high:g}", value)
        return float(value)

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        value = self.get(name)
        return None if value is None else _token_ids(self._within + name, value)

    def neutral(self, name: str, values: Sequence[Any]) -> None:
        """Refuse a field with another value than `values`; null is always one of them."""
        value = self.get(name)
        if value is None or any(isinstance(value, bool) == isinstance(each, bool) and value == each for each in values):
            return
        allowed = " and ".join(json.dumps(each) for each in values) or "null"
        rule = f"only {allowed} {'are' if len(values) > 1 else 'is'} offered"
        raise _refused(self._within + name, rule + _CONSEQUENCES.get(name, ""), value)


def _decoded(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise MalformedMessage(f"The body is not UTF-8 at byte {error.start}.", hint=_SEND_JSON) from None
    value = _json(text, "")
    if not isinstance(value, dict):
        raise MalformedMessage(f"The body is {_shown(value)}, not a JSON object.", hint=_SEND_JSON)
    return value


_SEND_JSON = "Send a JSON object in UTF-8."


class _NotStrict(ValueError):
    """A flaw that Python's JSON reader accepts."""


def _json(text: str, name: str) -> Any:
    """Return the JSON value in a text; an error names the field `name` that the text is in."""
    try:
        value = _DECODER.decode(text)
        _require_sound(value, name)
    except _NotStrict as error:
        reason = str(error)
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, at character {error.pos}"
    except ValueError:
        reason = "a number has too many digits"
    except RecursionError:
        raise _too_deep(name) from None
    else:
        return value
    raise MalformedMessage(f"{name or 'The body'} is not JSON: {reason}.", hint=_SEND_JSON, breach=Breach(name))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise _NotStrict(f"the field {_shown(name)} occurs twice")
        made[name] = value
    return made


def _constant(name: str) -> NoReturn:
    raise _NotStrict(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
_PLAIN = {int, bool, type(None)}


def _require_sound(value: Any, name: str) -> None:
    """Refuse infinite numbers, texts that are no Unicode, deep nesting and many values; a list of integers is one."""
    level, depth, items = [value], 0, 0
    while level:
        depth, items = depth + 1, items + len(level)
        if items > limits.QUERY_MAX_ITEMS:
            raise _too_large(name, f"{limits.QUERY_MAX_ITEMS:,} values", items)
        inner: list[Any] = []
        for each in level:
            if isinstance(each, str):
                _require_unicode(each)
            elif isinstance(each, float) and not math.isfinite(each):
                raise _NotStrict("a number is too large")
            elif isinstance(each, list | dict):
                if depth > limits.QUERY_MAX_DEPTH:
                    raise _too_deep(name)
                if isinstance(each, dict):
                    inner += [*each, *each.values()]
                elif not set(map(type, each)) <= _PLAIN:
                    inner += each
        level = inner


def _require_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _NotStrict("a text contains half of a surrogate pair") from None


SHOWN_MAX_CHARS = 64


def _shown(value: Any) -> str:
    """Return a value as JSON, short enough for a message; of a list or an object only the kind."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = value if isinstance(value, str) else json.dumps(value)
    short = one_line(text[:SHOWN_MAX_CHARS]) + ("…" if len(text) > SHOWN_MAX_CHARS else "")
    return json.dumps(short, ensure_ascii=False) if isinstance(value, str) else short


def _too_deep(name: str) -> SwarmError:
    return MessageTooLarge(
        f"{name or 'The body'} is nested more than {limits.QUERY_MAX_DEPTH} deep.", breach=Breach(name)
    )


def _missing(name: str) -> SwarmError:
    return MalformedMessage(f"{name} is missing.", hint=f"Send {name}.", breach=Breach(name))


def _wrong(name: str, expected: str, value: Any) -> SwarmError:
    message = f"{name} must be {expected}, not {'empty' if value in ('', [], {}) else _shown(value)}."
    return MalformedMessage(message, breach=Breach(name, expected, _shown(value)))


def _refused(name: str, rule: str, value: Any) -> SwarmError:
    hint = f"{rule[0].upper()}{rule[1:]}."
    return FieldRefused(f"{name} is {_shown(value)}.", hint=hint, breach=Breach(name, rule, _shown(value)))


def _too_large(name: str, limit: str, observed: int) -> SwarmError:
    message = f"{name or 'The body'} is too large: {observed:,}, and the limit is {limit}."
    return MessageTooLarge(message, breach=Breach(name, limit, str(observed)))


def _unknown(name: str, known: Sequence[str], elsewhere: Sequence[str], within: str) -> SwarmError:
    short = one_line(name[:SHOWN_MAX_CHARS])
    close = get_close_matches(short, known, n=1, cutoff=0.5)
    if name in elsewhere:
        hint = f"Only the route {'/v1/chat/completions' if name in _CHAT else '/v1/completions'} has it."
    else:
        hint = f"Did you mean {within}{close[0]}?" if close else "Leave it out."
    return FieldRefused(f"There is no field {within}{short}.", hint=hint, breach=Breach(within + short))
