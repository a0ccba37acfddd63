"""The coordinator's HTTP API as the node sees it: signed requests out, bounded replies in, errors by name.

- Every request is signed afresh, with a new nonce: a retry is a new request, never a replay.
- A reply is read up to its limit and no further; whatever it says, trust comes from signatures and hashes elsewhere.
- No answer, or one from a broken proxy, is `Unreachable`: the caller waits and tries again.
- Where the coordinator is overloaded, or a proxy before it, nothing is asked of it until its Retry-After is over.
"""

import math
import secrets
import time
from typing import TypeVar

import httpx
import trio

from protocol import canonical, limits
from protocol.auditing import Explanations, Why
from protocol.errors import SwarmError, Unreachable
from protocol.message import Message
from protocol.messages import (
    Fetched,
    Heartbeat,
    HeartbeatReply,
    LeaseProgress,
    LeaseProgressReply,
    LeaseReply,
    LeaseRequest,
    Plan,
    PlanRequest,
    Receipt,
    Register,
    ReturnLeases,
    Submission,
    SubmissionReply,
    VersionRequest,
    seal_request,
)
from protocol.origin import OriginList
from protocol.owner import Earnings, EarningsRequest, StatementReply
from protocol.signing import NodeKey
from swarm_node.origin import COORDINATORS, PLAIN, Origin, read_at_most

M = TypeVar("M", bound=Message)

TIMEOUT = httpx.Timeout(30.0, connect=10.0)

RETRY_AFTER_MAX_S = 60.0
"""The longest silence that an answer can ask for: a node is not put to sleep for a day by a proxy's mistake."""


class Coordinator:
    """A round's coordinator, called in the name of one node."""

    def __init__(self, url: str, round_id: str, key: NodeKey) -> None:
        self.url = url
        self._round_id = round_id
        self._key = key
        self._client = httpx.AsyncClient(base_url=url, timeout=TIMEOUT, headers=PLAIN, follow_redirects=False)
        self._quiet_until = -math.inf
        self.origin = Origin(f"{url}/v1", self._client, COORDINATORS)
        """The last resort for chunks, with more patience than others, and the first for documents."""

    async def register(self, message: Register) -> HeartbeatReply:
        return await self._call("/v1/nodes", message, HeartbeatReply)

    async def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        return await self._call("/v1/heartbeat", message, HeartbeatReply)

    async def newer_version(self, message: VersionRequest) -> HeartbeatReply:
        """Answered when there is a newer version, or after a while without."""
        return await self._call("/v1/versions", message, HeartbeatReply)

    async def lease(self, message: LeaseRequest) -> LeaseReply:
        return await self._call("/v1/leases", message, LeaseReply)

    async def give_back(self, message: ReturnLeases) -> HeartbeatReply:
        return await self._call("/v1/leases/return", message, HeartbeatReply)

    async def progress(self, message: LeaseProgress) -> LeaseProgressReply:
        return await self._call("/v1/leases/progress", message, LeaseProgressReply)

    async def submit(self, message: Submission) -> SubmissionReply:
        return await self._call("/v1/rollouts", message, SubmissionReply)

    async def plan(self, message: PlanRequest) -> Plan:
        return await self._call("/v1/plan", message, Plan)

    async def fetched(self, receipt: Receipt) -> HeartbeatReply:
        """Say that a version is here, and who sent it."""
        envelope = self._key.seal("receipt", receipt.to_bytes())
        return await self._call("/v1/fetched", Fetched(receipt=envelope), HeartbeatReply)

    async def why(self, message: Why) -> Explanations:
        """What became of this node's leases."""
        return await self._call("/v1/verdicts", message, Explanations)

    async def earnings(self) -> Earnings:
        """What the node's owner has earned."""
        return await self._call("/v1/earnings", EarningsRequest(), Earnings)

    async def state(self, statement: bytes) -> StatementReply:
        """Deliver what an owner has signed."""
        return StatementReply.from_bytes(await self._read("POST", "/v1/owners", statement, limits.MESSAGE_MAX_BYTES))

    async def origins(self) -> OriginList:
        """Where chunks and documents can be had besides the coordinator."""
        return OriginList.from_bytes(await self._read("GET", "/v1/origins", None, limits.SMALL_REQUEST_MAX_BYTES))

    async def close(self) -> None:
        await self._client.aclose()

    async def _call(self, path: str, message: Message, kind: type[M]) -> M:
        await trio.sleep_until(self._quiet_until)
        request = seal_request(
            self._key,
            round_id=self._round_id,
            path=path,
            nonce=secrets.token_bytes(limits.NONCE_BYTES),
            now_ms=time.time_ns() // 1_000_000,
            body=message,
        )
        return kind.from_bytes(await self._read("POST", path, request, limits.MESSAGE_MAX_BYTES))

    async def _read(self, method: str, path: str, body: bytes | None, max_bytes: int) -> bytes:
        try:
            async with self._client.stream(method, path, content=body) as response:
                data = await read_at_most(response, max_bytes)
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise Unreachable(
                f"The coordinator at {self.url} does not answer ({type(error).__name__}: {error}).",
                hint="The node keeps trying; check the network if this lasts.",
            ) from error
        if response.status_code // 100 == 2:
            return data
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            self._quiet_until = trio.current_time() + _seconds(response.headers.get("Retry-After", ""))
        raise _named_error(path, response.status_code, data)


def _named_error(path: str, status: int, data: bytes) -> SwarmError:
    """The error a coordinator's reply names; anything else comes from something that is no coordinator."""
    try:
        reason = canonical.decode(data, max_bytes=16 * limits.KIB)
    except SwarmError:
        return Unreachable(f"{path} answers with status {status} and no reason; is this the coordinator?")
    return SwarmError.from_wire(reason)


def _seconds(retry_after: str) -> float:
    """What the header asks for, within reason; its other form, a date, would need two clocks that agree."""
    return min(float(retry_after), RETRY_AFTER_MAX_S) if retry_after.isascii() and retry_after.isdigit() else 0.0
