"""The endpoint: OpenAI-compatible completions, which the round's nodes sample.

- Every request has an API key (`coordinator.transactions.api_keys`). A prompt becomes a query, and is answered by the
  node that takes it; the answer names the version that sampled it and the claims, whose receipts anybody can verify.
- `model` is `swarm`, for the version of whichever node answers, or `swarm@12` for version 12, while nodes hold it.
- `temperature` is the request's, from 0 to 2, or else the round's. At 0 the likeliest tokens are the answer.
- A caller that disconnects, or waits for longer than `Bounds.query_s`, withdraws its queries.
- Errors have OpenAI's form, with the code of `protocol.errors` inside.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from aiohttp import web

from coordinator.api.guard import BOUNDS
from coordinator.api.http import ROUND, body, error_headers, require_key
from coordinator.base.clock import now_ms
from coordinator.endpoint import replies
from coordinator.endpoint.replies import ReplyHead, SampleReply, ServedModel
from coordinator.endpoint.requests import CompletionQuery, read_chat, read_completion
from coordinator.endpoint.text_stream import TextStream, token_texts
from coordinator.service.query_watch import Answer
from coordinator.service.round import Round
from coordinator.tasks.task_text import TaskText
from coordinator.transactions import api_keys, queries
from coordinator.transactions.queries import Query
from coordinator.transactions.query_answers import QueryAnswer, SampledAnswer
from protocol import limits
from protocol.breach import Breach
from protocol.errors import FieldRefused, NotFound, SwarmError, Unreachable
from protocol.work.rollout import unpack_logprobs, unpack_tokens

routes = web.RouteTableDef()

MODEL = "swarm"

JSON = "application/json"

BODY_MAX_BYTES = 4 * limits.MIB
"""Room for a prompt as long as a model's longest context, as text or as token ids."""

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
    await round_.database.read(api_keys.number_of, require_key(request), now_ms=now_ms())
    text, held = await round_.text(), await _held(round_)
    names = [(MODEL, round_.news.version), *((f"{MODEL}@{version}", version) for version in held)]
    made_s, positions = round_.up_since_ms // 1000, text.positions or None
    return _json(replies.model_list([ServedModel(name, made_s, version, positions) for name, version in names]))


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
    if not request.content.is_eof():  # a body that did not arrive with its head costs memory
        await round_.database.read(api_keys.number_of, key, now_ms=now_ms())
    data = await body(request, BODY_MAX_BYTES)
    query = await round_.beside_the_loop(lambda: read(data))
    asked, is_answered = await _ask(round_, key, query, patience_s), False
    try:
        with round_.query_watch.awaited(asked.numbers) as answers:
            if query.stream:
                return await _stream(request, asked, answers)
            async with asyncio.timeout(patience_s):
                found = [await answer for answer in answers]
            is_answered = True
            samples = await round_.beside_the_loop(lambda: _samples(asked, found))
            head = asked.head(min(answer.version for answer in found))
            return _json(replies.whole_reply(head, query, asked.prompts, samples))
    except TimeoutError:
        raise _unanswered(patience_s) from None
    finally:
        if not is_answered:
            await asyncio.shield(_withdraw(round_, asked.numbers))


async def _stream(request: web.Request, asked: AskedQueries, answers: Sequence[Answer]) -> web.StreamResponse:
    """Send each prompt's samples as they come."""
    round_, bounds, query = request.app[ROUND], request.app[BOUNDS], asked.query
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    number = {answer: place for place, answer in enumerate(answers)}
    left, until_s = set(answers), asyncio.get_running_loop().time() + bounds.query_s
    version = sampled = 0
    while left:
        came, left = await asyncio.wait(left, timeout=bounds.query_alive_s, return_when=asyncio.FIRST_COMPLETED)
        if not came:
            await response.write(b": the nodes have not answered yet\n\n")
        if left and asyncio.get_running_loop().time() > until_s:
            _, error = replies.error_reply(_unanswered(bounds.query_s))
            await response.write(replies.as_event(error))
            return response
        for answer in came:
            found = answer.result()
            events, tokens = await round_.beside_the_loop(partial(_events, asked, number[answer], found))
            version, sampled = found.version, sampled + tokens
            await response.write(events)
    if query.include_usage:
        usage = replies.usage_chunk(asked.head(version), query, asked.prompts, sampled)
        await response.write(replies.as_event(usage))
    await response.write(replies.STREAM_END)
    return response


def _events(asked: AskedQueries, place: int, answer: QueryAnswer) -> tuple[bytes, int]:
    """Return the events with the samples of one prompt, and the number of their tokens."""
    head, first, events, tokens = asked.head(answer.version), place * asked.query.n, list[bytes](), 0
    for index, sample in enumerate(_samples_of(asked, answer), first):
        chunks = (
            replies.first_chunk(head, asked.query, index, asked.prompts[place]),
            replies.next_chunk(head, asked.query, index, sample),
        )
        events += [replies.as_event(chunk) for chunk in chunks]
        tokens += len(sample.tokens)
    return b"".join(events), tokens


async def _withdraw(round_: Round, numbers: Sequence[int]) -> None:
    """End the queries that are still open, as their caller waits no more."""
    await round_.database.run(queries.withdraw_open, numbers, now_ms=now_ms())


async def _ask(round_: Round, key: str, query: CompletionQuery, patience_s: float) -> AskedQueries:
    """Record a request's queries, and wake the nodes that wait for work."""
    text = await round_.text()
    version = await _version(round_, query.model)
    temperature = _own_temperature(query.temperature, round_.config.sampling.temperature)
    prompts = await round_.beside_the_loop(lambda: _prompts(text, query))
    most = min(query.max_tokens or text.bounds.max_new_tokens, text.bounds.max_new_tokens)
    for prompt in prompts:
        _require_fitting(prompt, text)
    async with round_.query_watch.asking:
        numbers = await round_.database.run_for_node(
            queries.ask,
            key,
            [Query(prompt, query.n, most, version, _seed(query.seed), temperature) for prompt in prompts],
            terms=round_.terms,
            max_price=round_.config.market.max_price_micros_per_mtok,
            patience_ms=int(patience_s * 1000),
            now_ms=now_ms(),
        )
    round_.idle_nodes.call(len(prompts))
    kind = "chatcmpl" if query.is_chat else "cmpl"
    identity = f"{kind}-{round_.round_id[:12]}-{numbers[0]}"
    return AskedQueries(query, prompts, numbers, text, identity, int(time.time()))


def _seed(seed: int | None) -> int | None:
    """Return the seed of a lease for that of a request, which may be negative."""
    return None if seed is None else seed % 2**63


def _own_temperature(asked: float | None, usual: float) -> float | None:
    """Return the temperature of the leases; None for the round's usual one. One that is nearly 0 is 0."""
    if asked is None or asked == usual:
        return None
    return 0.0 if asked < limits.TEMPERATURE_MIN else asked


async def _held(round_: Round) -> dict[int, int]:
    """Return the versions that live nodes hold and that may still be sampled, the newest first, and how many do."""
    return await round_.database.read(
        queries.versions_held, terms=round_.terms, alive_since_ms=now_ms() - round_.silent_after_ms
    )


async def _version(round_: Round, model: str) -> int | None:
    """Return the version that a model's name asks for; None for any. The newest one need not be at a node yet."""
    name, _, number = model.partition("@")
    if name == MODEL and not number:
        return None
    held = await _held(round_)
    if name == MODEL and number.isascii() and number.isdigit() and int(number) in (*held, round_.news.version):
        return int(number)
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
    return [_sample(asked, sample, answer.claims[-1]) for sample in answer.samples]


def _sample(asked: AskedQueries, sample: SampledAnswer, claim_id: str) -> SampleReply:
    """Return a sample with its text up to its end or to a stop string, and the tokens up to there."""
    tokens, decode = unpack_tokens(sample.tokens).tolist(), asked.text.decode
    stream = TextStream(decode, asked.query.stop, asked.text.bounds.end_tokens)
    text = stream.push(tokens) + stream.finish()
    assert stream.end is not None
    tokens = tokens[: stream.end.tokens]
    texts = token_texts(decode, tokens) if asked.query.logprobs else ()
    logprobs = unpack_logprobs(sample.logprobs)[: len(tokens)].tolist()
    return SampleReply(tokens, logprobs, text, stream.end.finish, claim_id, texts)


def _json(found: Mapping[str, Any]) -> web.Response:
    return web.Response(body=replies.as_json(found), content_type=JSON, headers={"Cache-Control": "no-store"})


def _unanswered(patience_s: float) -> Unreachable:
    return Unreachable(f"No node answered within {patience_s:g} s.", hint="Ask for fewer tokens, or ask later.")
