"""Nodes as their requests: honest ones that answer at a set pace, and attackers that lease and never answer."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from bench.control.fleet import PRICE
from protocol import limits
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey
from protocol.work.lease import Lease
from protocol.work.messages import (
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    Register,
    Submission,
    SubmissionReply,
    seal_request,
)
from protocol.work.rollout import RolloutClaim, Sample, pack_logprobs, pack_tokens
from tests.coordinator.policy_files import END_TOKEN, encode

M = TypeVar("M", bound=Message)

PAUSE_S = 0.25
"""The pause after an error, as when the coordinator is overloaded."""

TRIES = 3
"""Requests of a new key that gets no lease, until the next key comes."""


class Node:
    """An identity, and the newest version that it knows."""

    def __init__(self, server: str, round_id: str, local: str = "") -> None:
        host, _, port = server.rpartition(":")
        self._server, self._local = (host, int(port)), (local, 0) if local else None
        self._round_id = round_id
        self.key = NodeKey(secrets.token_bytes(32))
        self.version = 1

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["Line"]:
        """A connection of this node's."""
        reader, writer = await asyncio.open_connection(*self._server, local_addr=self._local)
        try:
            yield Line(self, reader, writer)
        finally:
            writer.close()

    def sealed(self, path: str, message: Message) -> bytes:
        nonce, now_ms = secrets.token_bytes(limits.NONCE_BYTES), time.time_ns() // 1_000_000
        body = seal_request(self.key, round_id=self._round_id, path=path, nonce=nonce, now_ms=now_ms, body=message)
        head = f"POST {path} HTTP/1.1\r\nHost: {self._server[0]}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    def answer(self, lease: Lease) -> bytes:
        """A well-formed answer, whatever the problem."""
        tokens, logprobs = pack_tokens([*encode("85"), END_TOKEN]), pack_logprobs([-0.5] * 3)
        claim = RolloutClaim(
            round_id=self._round_id,
            lease_id=lease.lease_id,
            lease_digest=lease.digest,
            samples=(Sample(tokens=tokens, logprobs=logprobs, finish="stop"),) * lease.samples,
        )
        return self.key.seal("rollout", claim.to_bytes())


class Line:
    """A connection, with one request at a time."""

    def __init__(self, node: Node, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._node, self._reader, self._writer = node, reader, writer

    async def call(self, path: str, message: Message, kind: type[M]) -> M | None:
        """The answer to a signed request; None if it was refused."""
        self._writer.write(self._node.sealed(path, message))
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.partition("content-length:")[2].partition("\r\n")[0])
        body = await self._reader.readexactly(size)
        return kind.from_bytes(body) if head.split(maxsplit=2)[1] == "200" else None

    async def register(self) -> None:
        message = Register(name="n", price_micros_per_mtok=PRICE, addresses=(), shares=False, agent="bench")
        await self.call("/v1/nodes", message, HeartbeatReply)

    async def lease(self) -> tuple[Lease | None, float]:
        """Request a lease; return it or None, and the seconds to wait."""
        reply = await self.call("/v1/leases", LeaseRequest(version=self._node.version, groups=1), LeaseReply)
        if reply is None:
            return None, PAUSE_S
        self._node.version = max(self._node.version, reply.newest_version)
        return (reply.leases[0] if reply.leases else None), reply.retry_s

    async def submit(self, lease: Lease) -> bool:
        message = Submission(rollouts=(self._node.answer(lease),))
        reply = await self.call("/v1/rollouts", message, SubmissionReply)
        return reply is not None and reply.verdicts[0].outcome == "accepted"


async def work(node: Node, hands: int, group_s: float) -> None:
    """Register and sample for ever: so many groups at once, each for so long."""
    async with node.connected() as line:
        await line.register()
    async with asyncio.TaskGroup() as group:
        for _ in range(hands):
            group.create_task(_sample(node, group_s))


async def _sample(node: Node, group_s: float) -> None:
    async with node.connected() as line:
        while True:
            lease, retry_s = await line.lease()
            if lease is None:
                await asyncio.sleep(retry_s)
            else:
                await asyncio.sleep(group_s)  # the pace is played
                await line.submit(lease)


async def hoard(node: Node) -> None:
    """Register, and lease for ever without an answer."""
    async with node.connected() as line:
        await line.register()
        while True:
            _, retry_s = await line.lease()
            await asyncio.sleep(max(retry_s, PAUSE_S))


async def hoard_once(node: Node) -> None:
    """Register, take one lease and go."""
    async with node.connected() as line:
        await line.register()
        for _ in range(TRIES):
            lease, retry_s = await line.lease()
            if lease is not None:
                return
            await asyncio.sleep(max(retry_s, PAUSE_S))
