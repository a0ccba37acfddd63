"""The endpoint: OpenAI-compatible completions, which the round's nodes sample.

- Every request has an API key (`coordinator.transactions.api_keys`). A prompt becomes a query, and is answered by the
  node that takes it; the answer names the version that sampled it and the claims, whose receipts anybody can verify.
- `model` is `swarm`, for the version of whichever node answers, or `swarm@12` for version 12, while nodes hold it.
- `temperature` is the request's, from 0 to 2, or else the round's. At 0 the likeliest tokens are the answer.
- A caller that disconnects, or waits for longer than `Bounds.query_s`, withdraws its queries, and pays only the nodes
  that answer them all the same. Those of which its stream has sent tokens stay, and are charged: else whoever hangs up
  before the last event would have the tokens for nothing.
- Errors have OpenAI's form, with the code of `protocol.errors` inside.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from aiohttp import web

from coordinator.api.guard import BOUNDS
from coordinator.api.http import ROUND, asked_days, body, error_headers, read_for_key, require_key
from coordinator.base.clock import now_ms
from coordinator.endpoint import replies
from coordinator.endpoint.replies import ReplyHead, SampleReply, ServedModel
from coordinator.endpoint.requests import MODEL, CompletionQuery, model_version, read_chat, read_completion
from coordinator.endpoint.sample_stream import SampleStream
from coordinator.service.round import Round
from coordinator.service.waiting import News
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import api_keys, queries
from coordinator.transactions.queries import Query
from coordinator.transactions.query_answers import Growth, QueryAnswer, SampledAnswer
from protocol import limits
from protocol.breach import Breach
from protocol.errors import AnswerChanged, FieldRefused, NotFound, SwarmError, Unreachable
from protocol.work.rollout import unpack_logprobs, unpack_tokens

routes = web.RouteTableDef()

REPORT_EVERY_MS = 250
"""The interval at which nodes report the tokens of a stream: four times a second, a text grows as fast as one reads."""

JSON = "application/json"

BODY_MAX_BYTES = 4 * limits.MIB
"""Room for a prompt as long as a model's longest context, as text or as token ids."""

CHEAP_BODY_BYTES = 4 * limits.KIB
"""A body that is read before its key is looked up, which happens only once then: when its queries are recorded."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class AskedQueries:
    """The queries of a request, and what is needed to write its reply."""

    query: CompletionQuery
    prompts: tuple[tuple[int, ...], ...]
    numbers: list[int]
    text: TaskText
    identity: str
    made_s: int

    def head(self, version: int) -> ReplyHead:
        """Return the head of a reply with answers of a version."""
        return ReplyHead(self.identity, self.made_s, self.query.model, version)


def _in_openai_form(handler: Handler) -> Handler:
    """Return the handler with its errors in OpenAI's form."""

    @wraps(handler)
    async def answered(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except SwarmError as error:
            status, found = replies.error_reply(error)
            return web.Response(
                body=replies.as_json(found), content_type=JSON, status=status, headers=error_headers(error)
            )

    return answered


@routes.get("/v1/models")
@_in_openai_form
async def models(request: web.Request) -> web.Response:
    """List the versions that nodes hold, as models."""
    round_ = request.app[ROUND]
    await read_for_key(request, api_keys.number_of, require_key(request), now_ms=now_ms())
    held = await _held_versions(request)
    names = [(MODEL, round_.news.version), *((f"{MODEL}@{version}", version) for version in held)]
    return _json(replies.model_list([await _served(round_, name, version) for name, version in names]))


@routes.get("/v1/models/{model:.{1,60}}")
@_in_openai_form
async def model(request: web.Request) -> web.Response:
    """Return one model, under a name that a query may have."""
    round_, name = request.app[ROUND], request.match_info["model"]
    await read_for_key(request, api_keys.number_of, require_key(request), now_ms=now_ms())
    version = await _version(request, name)
    found = await _served(round_, name, round_.news.version if version is None else version)
    return _json(replies.model_entry(found))


async def _served(round_: Round, name: str, version: int) -> ServedModel:
    text = await round_.policy.text()
    return ServedModel(name, round_.up_since_ms // 1000, version, text.positions or None)


@routes.get("/v1/usage")
@_in_openai_form
async def usage(request: web.Request) -> web.Response:
    """Return what the caller's key has spent, what is left, and its queries and tokens, also of the last days."""
    round_, key = request.app[ROUND], require_key(request)
    days = asked_days(request)
    found = await read_for_key(request, api_keys.usage_of, key, days, now_ms=now_ms())
    return _json({"object": "usage", **found, "unit": round_.config.round.money.to_json()})


@routes.post("/v1/completions")
@_in_openai_form
async def completions(request: web.Request) -> web.StreamResponse:
    """Complete prompts, in the form of OpenAI's completions."""
    return await _complete(request, read_completion)


@routes.post("/v1/chat/completions")
@_in_openai_form
async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer messages, in the form of OpenAI's chat completions."""
    return await _complete(request, read_chat)


async def _complete(request: web.Request, read: Callable[[bytes], CompletionQuery]) -> web.StreamResponse:
    round_, key, patience_s = request.app[ROUND], require_key(request), request.app[BOUNDS].query_s
    size = request.content_length
    is_cheap = request.content.is_eof() and size is not None and size <= CHEAP_BODY_BYTES
    if not is_cheap:  # to receive or to read it costs more than to look up the key
        await read_for_key(request, api_keys.number_of, key, now_ms=now_ms())
    data = await body(request, BODY_MAX_BYTES)
    query = await round_.beside_the_loop(lambda: read(data))
    asked, is_answered = await _ask(request, key, query, patience_s), False
    begun = set[int]()
    """The queries of which the caller has tokens: it pays for their answers, also if it leaves."""
    try:
        with round_.waiting.queries.awaited(asked.numbers, grows=query.grows) as news:
            if query.stream:
                return await _stream(request, asked, news, begun)
            async with asyncio.timeout(patience_s):
                found = await _answers(asked, news)
            is_answered = True
            samples = await round_.beside_the_loop(lambda: _samples(asked, found))
            head = asked.head(min(answer.version for answer in found))
            return _json(replies.whole_reply(head, query, asked.prompts, samples))
    except TimeoutError:
        raise _unanswered(query, patience_s) from None
    finally:
        if not is_answered:
            await asyncio.shield(_withdraw(round_, [number for number in asked.numbers if number not in begun]))


async def _answers(asked: AskedQueries, news: News) -> list[QueryAnswer]:
    """Wait for the answers to all prompts; return them in the order of the prompts."""
    found: dict[int, QueryAnswer] = {}
    while len(found) < len(asked.numbers):
        number, came = await news.get()
        if isinstance(came, NotFound):
            raise came
        if isinstance(came, QueryAnswer):
            found[number] = came
    return [found[number] for number in asked.numbers]


async def _stream(request: web.Request, asked: AskedQueries, news: News, begun: set[int]) -> web.StreamResponse:
    """Send each prompt's samples as they come: while they are sampled, or in one piece if calls are read from them.

    The queries of which tokens were sent are added to `begun`, until the round itself gives them up.
    """
    round_, bounds, query = request.app[ROUND], request.app[BOUNDS], asked.query
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    streams = {number: PromptStream(asked, place) for place, number in enumerate(asked.numbers)}
    left, until_s, version = set(streams), asyncio.get_running_loop().time() + bounds.query_s, 0
    while left:
        try:
            async with asyncio.timeout(bounds.query_alive_s):
                number, came = await news.get()
        except TimeoutError:
            if asyncio.get_running_loop().time() > until_s:
                begun.clear()
                return await _end_with(response, _unanswered(query, bounds.query_s))
            await response.write(b": the nodes have not answered yet\n\n")
            continue
        if isinstance(came, NotFound):
            begun.clear()
            return await _end_with(response, came)
        try:
            events = await round_.beside_the_loop(partial(streams[number].events, came))
        except AnswerChanged as error:
            return await _end_with(response, error)
        version = came.version
        left -= {number} if isinstance(came, QueryAnswer) else set()
        begun |= {number} if events else set()
        await response.write(events)
    if query.include_usage:
        sampled = sum(stream.sent_tokens for stream in streams.values())
        usage = replies.usage_chunk(asked.head(version), query, asked.prompts, sampled)
        await response.write(replies.as_event(usage))
    await response.write(replies.STREAM_END)
    return response


async def _end_with(response: web.StreamResponse, error: SwarmError) -> web.StreamResponse:
    """End a stream by an error."""
    await response.write(replies.as_event(replies.error_reply(error)[1]))
    return response


class PromptStream:
    """The samples of one prompt in a stream."""

    def __init__(self, asked: AskedQueries, place: int) -> None:
        self._asked, self._prompt = asked, asked.prompts[place]
        self._first = place * asked.query.n
        self._samples = [_sample_stream(asked) for _ in range(asked.query.n)]
        self._begun = set[int]()

    @property
    def sent_tokens(self) -> int:
        """Return the number of tokens that were sent."""
        return sum(sample.sent_tokens for sample in self._samples)

    def events(self, came: Growth | QueryAnswer) -> bytes:
        """Return the events with what came; empty if a caller cannot see any of it yet."""
        return b"".join(
            replies.as_event(chunk)
            for place, part in (self._last_parts(came) if isinstance(came, QueryAnswer) else self._parts(came))
            for chunk in self._chunks(self._asked.head(came.version), place, part)
        )

    def _parts(self, growth: Growth) -> Iterator[tuple[int, SampleReply]]:
        for grown in growth.samples:
            tokens, logprobs = unpack_tokens(grown.tokens).tolist(), unpack_logprobs(grown.logprobs).tolist()
            part = self._samples[grown.sample].push(grown.start, tokens, logprobs)
            if part is not None and part.tokens:
                yield grown.sample, part

    def _last_parts(self, answer: QueryAnswer) -> Iterator[tuple[int, SampleReply]]:
        for place, (stream, sample) in enumerate(zip(self._samples, answer.samples, strict=True)):
            yield place, _finish(stream, sample, answer)

    def _chunks(self, head: ReplyHead, place: int, part: SampleReply) -> Iterator[dict[str, Any]]:
        query, index = self._asked.query, self._first + place
        if place not in self._begun:
            self._begun.add(place)
            yield replies.first_chunk(head, query, index, self._prompt)
        yield replies.next_chunk(head, query, index, part)


async def _withdraw(round_: Round, numbers: Sequence[int]) -> None:
    """End the queries that are still open, as their caller waits no more."""
    await round_.database.run(queries.withdraw_open, numbers, now_ms=now_ms())


async def _ask(request: web.Request, key: str, query: CompletionQuery, patience_s: float) -> AskedQueries:
    """Record a request's queries, with leases for the nodes that wait for work."""
    round_ = request.app[ROUND]
    text = await round_.policy.text()
    version = await _version(request, query.model)
    temperature = _own_temperature(query.temperature, round_.config.sampling.temperature)
    every_ms = REPORT_EVERY_MS if query.grows else None
    prompts = await round_.beside_the_loop(lambda: _prompts(text, query))
    most = min(query.max_tokens or text.bounds.max_new_tokens, text.bounds.max_new_tokens)
    for prompt in prompts:
        _require_fitting(prompt, text)
    async with round_.waiting.queries.asking:
        record = partial(
            queries.ask,
            key=key,
            asked=[
                Query(
                    prompt,
                    query.n,
                    most,
                    version,
                    _seed(query),
                    temperature,
                    every_ms,
                    query.priority,
                    query.max_price_micros_per_mtok,
                )
                for prompt in prompts
            ],
            terms=round_.terms,
            dearest_price=round_.config.market.dearest_micros_per_mtok,
            patience_ms=int(patience_s * 1000),
            now_ms=now_ms(),
        )
        offers = round_.waiting.idle_nodes.follow(len(prompts))
        numbers = await round_.database.run_followed(record, offers)
    round_.waiting.idle_nodes.call(len(prompts) - len(offers))
    kind = "chatcmpl" if query.is_chat else "cmpl"
    identity = f"{kind}-{round_.round_id[:12]}-{numbers[0]}"
    return AskedQueries(query, prompts, numbers, text, identity, int(time.time()))


def _seed(query: CompletionQuery) -> int | None:
    """Return the seed of a request's leases; None if each lease may have its own.

    One that is read while it grows has the same seed at every node: if a node is lost, the next draws the same tokens.
    """
    if query.seed is None:
        return secrets.randbits(63) if query.grows else None
    return query.seed % 2**63  # that of a request may be negative


def _own_temperature(asked: float | None, usual: float) -> float | None:
    """Return the temperature of the leases; None for the round's usual one. One that is nearly 0 is 0."""
    if asked is None or asked == usual:
        return None
    return 0.0 if asked < limits.TEMPERATURE_MIN else asked


async def _held_versions(request: web.Request) -> dict[int, int]:
    """Return the versions that live nodes hold and that may still be sampled, the newest first, and how many do."""
    round_ = request.app[ROUND]
    alive_since_ms = now_ms() - round_.silent_after_ms
    return await read_for_key(request, queries.versions_held, terms=round_.terms, alive_since_ms=alive_since_ms)


async def _version(request: web.Request, model: str) -> int | None:
    """Return the version that a model's name asks for; None for any. The newest one need not be at a node yet."""
    if model == MODEL:
        return None
    held, version = await _held_versions(request), model_version(model)
    if version is not None and version in (*held, request.app[ROUND].news.version):
        return version
    there = ", ".join([MODEL, *(f"{MODEL}@{version}" for version in held)])
    raise NotFound(f"The model {model[:60]!r} is not here.", hint=f"Models: {there}.")


def _prompts(text: TaskText, query: CompletionQuery) -> tuple[tuple[int, ...], ...]:
    """Return the prompts of a request as tokens; those of a chat may come as tokens beside the messages."""
    if not query.prompts:
        return (tuple(text.encode_messages(query.messages, query.tools)),)
    return tuple(tuple(text.encode(prompt) if isinstance(prompt, str) else prompt) for prompt in query.prompts)


def _require_fitting(prompt: Sequence[int], text: TaskText) -> None:
    """Refuse a prompt that an engine would refuse: it must leave room for the longest completion of the round."""
    if not prompt:
        raise FieldRefused("The prompt has no tokens.", hint="Send some text.", breach=Breach("prompt"))
    if (highest := max(prompt)) >= text.bounds.vocab_size:
        said = f"The prompt has the token {highest}; the vocabulary has {text.bounds.vocab_size}."
        raise FieldRefused(said, breach=Breach("prompt"))
    most = text.bounds.max_new_tokens
    if text.positions and len(prompt) > (room := text.positions - most):
        raise FieldRefused(
            f"The prompt has {len(prompt):,} tokens; beside the round's {most:,} new ones, there is room for {room:,}.",
            hint="Shorten the prompt.",
            breach=Breach("prompt"),
        )


def _samples(asked: AskedQueries, answers: Sequence[QueryAnswer]) -> list[SampleReply]:
    """Return the samples of all prompts, in the order of the prompts."""
    return [sample for answer in answers for sample in _samples_of(asked, answer)]


def _samples_of(asked: AskedQueries, answer: QueryAnswer) -> list[SampleReply]:
    return [_finish(_sample_stream(asked), sample, answer) for sample in answer.samples]


def _sample_stream(asked: AskedQueries) -> SampleStream:
    text, query = asked.text, asked.query
    return SampleStream(text.decode, query.stop, text.bounds.end_tokens, with_texts=query.logprobs)


def _finish(stream: SampleStream, sample: SampledAnswer, answer: QueryAnswer) -> SampleReply:
    """Return the rest of a sample; its receipt is the claim of the node that completed it."""
    tokens, logprobs = unpack_tokens(sample.tokens).tolist(), unpack_logprobs(sample.logprobs).tolist()
    return stream.finish(tokens, logprobs, answer.claims[-1])


def _json(found: Mapping[str, Any]) -> web.Response:
    return web.Response(body=replies.as_json(found), content_type=JSON, headers={"Cache-Control": "no-store"})


def _unanswered(query: CompletionQuery, patience_s: float) -> Unreachable:
    if (price := query.max_price_micros_per_mtok) is None:
        return Unreachable(f"No node answered within {patience_s:g} s.", hint="Ask for fewer tokens, or ask later.")
    return Unreachable(
        f"No node with a price of at most {price} micros per million tokens answered within {patience_s:g} s.",
        hint="Raise max_price_micros_per_mtok, ask for fewer tokens, or ask later.",
    )
