"""Client of the coordinator's HTTP API: signed requests, bounded replies, typed errors.

- Every request is signed again, with a new nonce: a retry is a new request, never a replay.
- A reply is read up to its limit; its contents are trusted only through signatures and hashes checked elsewhere.
- A missing answer, an answer of a broken proxy, or an endless answer is `Unreachable`: the caller waits and retries.
- Each answer's Date gives the clock difference; `now_ms` is the coordinator's time, by which leases expire.
- If the coordinator or its proxy is overloaded, no request is sent until Retry-After is over.
"""

import json
import math
import secrets
import time
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar

import httpx
import trio

from protocol import limits
from protocol.errors import MalformedMessage, SwarmError, Unreachable, WrongAddress
from protocol.ids import NodeId
from protocol.people.owner import Earnings, EarningsRequest, StatementReply
from protocol.policy.origin import OriginList
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey
from protocol.work.messages import (
    Dial,
    Dialled,
    Fetched,
    FetchPlan,
    Heartbeat,
    HeartbeatReply,
    LeaseProgress,
    LeaseProgressReply,
    LeaseReply,
    LeaseRequest,
    PlanRequest,
    Register,
    ReturnLeases,
    Submission,
    SubmissionReply,
    TransferReceipt,
    Uploaded,
    VersionRequest,
    seal_request,
)
from swarm_node.base.clock import now_ms
from swarm_node.coordinator_api.origin import COORDINATORS, PLAIN, Origin, no_answer, read_at_most, retry_after_s

if TYPE_CHECKING:
    from ledger.payout_proof import PayoutReply
    from ledger.witness import CosignatureReply
    from protocol.work.appeal import AppealReply
    from protocol.work.auditing import Explanations, Why

M = TypeVar("M", bound=Message)

CLOCKS_AGREE_S = 2.0
"""The header has whole seconds, and an answer takes time: smaller differences are ignored."""

TIMEOUT = httpx.Timeout(30.0, connect=10.0)

HELD_S = 30.0
"""Longest time for which the coordinator holds a request open until there is news."""

SENT_BYTES_PER_S = 8 * limits.KIB
"""Slowest upload rate that a coordinator accepts."""

PROXIES = (502, 503, 504)
"""The answers of a proxy whose coordinator does not answer."""

LATER = (408, 425, 429)
"""The answers of a proxy or web server that may answer otherwise later, in the range of those that will not."""

NEVER = (501, 505)
"""The answers beside that range of servers that do not know the request."""

ANOTHER_SERVER = "Another server than an Echo Swarm coordinator answers there: check the address and its port."


class Coordinator:
    """Client of a round's coordinator, for one node."""

    def __init__(
        self, url: str, round_id: str, key: NodeKey, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url = url
        self._round_id = round_id
        self._key = key
        self._client = httpx.AsyncClient(
            base_url=url, timeout=TIMEOUT, headers=PLAIN, follow_redirects=False, transport=transport
        )
        self._quiet_until = -math.inf
        self.clock_offset_s: float | None = None
        """Clock difference in seconds, coordinator minus this machine, ±1 s; None before the first answer."""
        self.origin = Origin(f"{url}/v1", self._client, COORDINATORS)
        """Last source of chunks, with longer time-outs than others, and first source of documents."""

    @property
    def node_id(self) -> NodeId:
        """Id of the node that this client signs for."""
        return self._key.node_id

    async def register(self, message: Register) -> HeartbeatReply:
        return await self._call("/v1/nodes", message, HeartbeatReply)

    async def heartbeat(self, message: Heartbeat) -> HeartbeatReply:
        return await self._call("/v1/heartbeat", message, HeartbeatReply)

    async def newer_version(self, message: VersionRequest) -> HeartbeatReply:
        """Wait until there is a newer version, or for `HELD_S` at most."""
        return await self._call("/v1/versions", message, HeartbeatReply)

    async def lease(self, message: LeaseRequest) -> LeaseReply:
        return await self._call("/v1/leases", message, LeaseReply)

    async def return_leases(self, message: ReturnLeases) -> HeartbeatReply:
        return await self._call("/v1/leases/return", message, HeartbeatReply)

    async def progress(self, message: LeaseProgress) -> LeaseProgressReply:
        return await self._call("/v1/leases/progress", message, LeaseProgressReply)

    async def submit(self, message: Submission) -> SubmissionReply:
        reply = await self._call("/v1/rollouts", message, SubmissionReply)
        if len(reply.verdicts) != len(message.rollouts):
            said = f"The coordinator returned {len(reply.verdicts)} verdicts for {len(message.rollouts)} rollouts."
            raise MalformedMessage(said)
        return reply

    async def plan(self, message: PlanRequest) -> FetchPlan:
        return await self._call("/v1/plan", message, FetchPlan)

    async def fetched(self, receipt: TransferReceipt) -> HeartbeatReply:
        """Report a downloaded version and the peers that sent it."""
        envelope = self._key.seal("receipt", receipt.to_bytes())
        return await self._call("/v1/fetched", Fetched(receipt=envelope), HeartbeatReply)

    async def why(self, message: "Why") -> "Explanations":
        """Request the outcome of this node's leases."""
        from protocol.work.auditing import Explanations

        return await self._call("/v1/verdicts", message, Explanations)

    async def earnings(self) -> Earnings:
        """Request the earnings of the node's owner."""
        return await self._call("/v1/earnings", EarningsRequest(), Earnings)

    async def payout(self, batch: int) -> "PayoutReply":
        """Request the payout of the node's owner in a batch, with its proof."""
        from ledger.payout_proof import PayoutReply, PayoutRequest

        return await self._call("/v1/payouts", PayoutRequest(batch=batch), PayoutReply)

    async def state(self, statement: bytes) -> StatementReply:
        """Send an owner's signed statement."""
        return StatementReply.from_bytes(await self._read("POST", "/v1/owners", statement, limits.MESSAGE_MAX_BYTES))

    async def appeal(self, appeal: bytes) -> "AppealReply":
        """Send a signed appeal of a node or its owner against a fault or a ban."""
        from protocol.work.appeal import AppealReply

        return AppealReply.from_bytes(await self._read("POST", "/v1/appeals", appeal, limits.MESSAGE_MAX_BYTES))

    async def cosign(self, note: bytes) -> "CosignatureReply":
        """Send a checkpoint that a witness has signed."""
        from ledger.witness import CosignatureReply

        data = await self._read("POST", "/v1/ledger/cosignatures", note, limits.MESSAGE_MAX_BYTES)
        return CosignatureReply.from_bytes(data)

    async def upload(self, data: bytes) -> Uploaded:
        """Send bytes to measure the uplink; the coordinator discards them."""
        return Uploaded.from_bytes(await self._read("POST", "/v1/probe/upload", data, limits.SMALL_REQUEST_MAX_BYTES))

    async def dial_me(self, message: Dial) -> Dialled:
        """Ask the coordinator to dial this machine, at the address that it sees."""
        return await self._call("/v1/probe/dial", message, Dialled)

    async def status(self) -> dict[str, Any]:
        """Request the round's public status."""
        return await self._json("/v1/status")

    async def rates(self, owner: str) -> dict[str, Any]:
        """Request the public rates and payouts of an owner."""
        return await self._json(f"/v1/owners/{owner}/rates")

    async def leaderboard(self) -> list[dict[str, Any]]:
        """Request the round's public leaderboard."""
        rows: list[dict[str, Any]] = (await self._json("/v1/leaderboard")).get("nodes", [])
        return rows

    async def origins(self) -> OriginList:
        """Request the list of origins of chunks and documents besides the coordinator."""
        return OriginList.from_bytes(await self._read("GET", "/v1/origins", None, limits.SMALL_REQUEST_MAX_BYTES))

    async def close(self) -> None:
        await self._client.aclose()

    def now_ms(self) -> int:
        """Return the coordinator's time; within `CLOCKS_AGREE_S` this machine's, which is finer."""
        offset_s = self.clock_offset_s or 0.0
        return int(1000 * (time.time() + (offset_s if abs(offset_s) > CLOCKS_AGREE_S else 0.0)))

    async def _json(self, path: str) -> dict[str, Any]:
        try:
            document = json.loads(await self._read("GET", path, None, limits.MESSAGE_MAX_BYTES))
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise WrongAddress(f"{self.url}{path} did not return JSON.", hint=ANOTHER_SERVER)
        return document

    async def _call(self, path: str, message: Message, kind: type[M]) -> M:
        await trio.sleep_until(self._quiet_until)
        request = seal_request(
            self._key,
            round_id=self._round_id,
            path=path,
            nonce=secrets.token_bytes(limits.NONCE_BYTES),
            now_ms=now_ms(),
            body=message,
        )
        return kind.from_bytes(await self._read("POST", path, request, limits.MESSAGE_MAX_BYTES))

    async def _read(self, method: str, path: str, body: bytes | None, max_bytes: int) -> bytes:
        patience_s = HELD_S + COORDINATORS.grace_s + max_bytes / COORDINATORS.rate_bytes_per_s
        try:
            with trio.fail_after(patience_s + len(body or b"") / SENT_BYTES_PER_S):
                async with self._client.stream(method, path, content=body) as response:
                    self.clock_offset_s = offset_s(response.headers.get("Date", ""), time.time())
                    data = await read_at_most(response, max_bytes)
        except trio.TooSlowError:
            raise Unreachable(f"The coordinator at {self.url} did not respond to {path} in time.") from None
        except (httpx.HTTPError, httpx.StreamError, UnicodeError) as error:  # a name that IDNA cannot decode
            raise no_answer(f"The coordinator at {self.url} does not respond", error) from error
        if response.status_code // 100 == 2:
            return data
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            self._quiet_until = trio.current_time() + retry_after_s(response)
        raise _named_error(response, f"{self.url}{path}", data)


def _named_error(response: httpx.Response, url: str, data: bytes) -> SwarmError:
    """Return the error in a coordinator's reply; any other reply is not from a coordinator."""
    status = response.status_code
    try:
        reason = canonical.decode(data, max_bytes=16 * limits.KIB)
    except SwarmError:
        if status in PROXIES:
            return Unreachable(f"The coordinator does not answer its proxy, which returned HTTP status {status}.")
        said = f"{url} returned HTTP status {status} without a reason"
        if status in NEVER or (300 <= status < 500 and status not in LATER):
            place = response.headers.get("Location", "")
            return WrongAddress(f"{said}{f' and leads to {place[:100]}' if place else ''}.", hint=ANOTHER_SERVER)
        return Unreachable(f"{said}.", hint="Check that the address is the coordinator's.")
    return SwarmError.from_wire(reason)


def offset_s(date: str, answered_s: float) -> float | None:
    """Return how far a server's clock is ahead, by the whole second in its Date header, which is set when the answer is
    sent, also after a long wait."""
    try:
        named = parsedate_to_datetime(date).timestamp() + 0.5
    except (TypeError, ValueError, OverflowError):
        return None
    return named - answered_s
