"""Callers of an endpoint of OpenAI's form, which measure how long each answer takes."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp

REQUEST_S = 900.0
RETRY_S = 1.0


@dataclass(frozen=True)
class Endpoint:
    """A server and the way to ask it."""

    url: str
    key: str = ""
    model: str = "swarm"

    def body(self, number: int, tokens: int) -> dict[str, object]:
        return {"model": self.model, "prompt": f"{number % 90 + 10}+{number % 89 + 10}=", "max_tokens": tokens}


async def _first_tokens(endpoint: Endpoint, numbers: Sequence[int], tokens: int) -> list[float]:
    """Return the seconds from each request to the first event of its stream that has a token."""
    seconds = []
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        for number in numbers:
            body = {**endpoint.body(number, tokens), "stream": True, "return_token_ids": True}
            began, first = time.monotonic(), 0.0
            async with session.post(f"{endpoint.url}/completions", json=body) as reply:
                async for line in reply.content:
                    choices = json.loads(line[6:])["choices"] if line.startswith(b"data: {") else ()
                    if not first and any(choice.get("token_ids") for choice in choices):
                        first = time.monotonic()
            seconds.append(first - began)
    return seconds


def first_tokens(endpoint: Endpoint, numbers: Sequence[int], *, tokens: int) -> list[float]:
    """Read a stream for each number, one after the other, and return when the first token of each came."""
    return asyncio.run(_first_tokens(endpoint, numbers, tokens))


@dataclass
class Called:
    """The answers to some callers."""

    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    refused: int = 0
    """Times that the server said to come back later."""


async def ask(session: aiohttp.ClientSession, endpoint: Endpoint, number: int, tokens: int, called: Called) -> None:
    """Ask once, again where the server is busy, and record the time from the first try to the answer."""
    began = time.monotonic()
    while True:
        async with session.post(f"{endpoint.url}/completions", json=endpoint.body(number, tokens)) as reply:
            if reply.status == 200:
                called.tokens += (await reply.json())["usage"]["completion_tokens"]
                called.seconds.append(time.monotonic() - began)
                return
            if reply.status != 503:
                raise RuntimeError(f"{endpoint.url} answered {reply.status}: {await reply.text()}")
        called.refused += 1
        await asyncio.sleep(float(reply.headers.get("Retry-After", RETRY_S)))


async def _call(endpoint: Endpoint, numbers: Sequence[int], tokens: int, at_once: int) -> Called:
    called, left = Called(), list(reversed(numbers))
    headers = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(REQUEST_S)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout, headers=headers) as session:

        async def caller() -> None:
            while left:
                await ask(session, endpoint, left.pop(), tokens, called)

        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(caller())
    return called


def call(endpoint: Endpoint, numbers: Sequence[int], *, tokens: int, at_once: int = 1) -> Called:
    """Ask for a completion for each number, so many at once."""
    return asyncio.run(_call(endpoint, numbers, tokens, at_once))
