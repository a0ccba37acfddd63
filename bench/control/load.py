"""Load over real sockets: connections that send prepared requests one after the other, with the least work for it."""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Reply:
    """The reply to a request, and its duration."""

    status: int
    retry_after: bool
    body: bytes
    seconds: float


async def drive(addresses: Sequence[str], requests: Sequence[tuple[str, bytes]], *, connections: int) -> list[Reply]:
    """Send every request once, to whichever server is free; the replies in the order of the requests."""
    replies: list[Reply | None] = [None] * len(requests)
    waiting = iter(enumerate(requests))
    async with asyncio.TaskGroup() as group:
        for number in range(connections):
            group.create_task(_send(addresses[number % len(addresses)], waiting, replies))
    return [reply for reply in replies if reply]


async def _send(address: str, waiting: Iterator[tuple[int, tuple[str, bytes]]], replies: list[Reply | None]) -> None:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for number, (path, body) in waiting:
            started = time.perf_counter()
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("content-length:")[2].partition("\r\n")[0])
            answer = await reader.readexactly(size)
            seconds = time.perf_counter() - started
            replies[number] = Reply(int(head.split(maxsplit=2)[1]), "\r\nretry-after:" in head, answer, seconds)
    finally:
        writer.close()
