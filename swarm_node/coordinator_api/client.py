"""The coordinator's HTTP API as the node sees it: signed requests out, bounded replies in, errors by name.

- Every request is signed afresh, with a new nonce: a retry is a new request, never a replay.
- A reply is read up to its limit and no further; whatever it says, trust comes from signatures and hashes elsewhere.
- No answer, one from a broken proxy, or one that goes on for ever, is `Unreachable`: the caller waits and tries again.
- Each answer's Date says how far this machine's clock is off; `now_ms` is the coordinator's time, by which leases end.
- Where the coordinator is overloaded, or a proxy before it, nothing is asked of it until its Retry-After is over.
"""

import json
import math
import secrets
import time
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx
import trio

from ledger.payout_proof import PayoutReply, PayoutRequest
from ledger.witness import CosignatureReply
from protocol import limits
from protocol.errors import MalformedMessage, SwarmError, Unreachable
from protocol.people.owner import Earnings, EarningsRequest, StatementReply
from protocol.policy.origin import OriginList
from protocol.wire import canonical
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey
from protocol.work.appeal import AppealReply
from protocol.work.auditing import Explanations, Why
from protocol.work.messages import (
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
    VersionRequest,
    seal_request,
)
from protocol.work.probe import Dial, Dialled, Uploaded
from swarm_node.coordinator_api.origin import COORDINATORS, PLAIN, Origin, read_at_most

M = TypeVar("M", bound=Message)

CLOCKS_AGREE_S = 2.0
"""A header names whole seconds, and an answer takes a while: less than this is no difference."""

TIMEOUT = httpx.Timeout(30.0, connect=10.0)

HELD_S = 30.0
"""For a question that the coordinator holds open until there is news, which it does for no longer."""

SENT_BYTES_PER_S = 8 * limits.KIB
"""The slowest line by which a coordinator takes a body."""

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
        self.clock_offset_s: float | None = None
        """How far the coordinator's clock is ahead of this machine's, to a second; None before the first answer."""
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
        reply = await self._call("/v1/rollouts", message, SubmissionReply)
        if len(reply.verdicts) != len(message.rollouts):
            said = f"The coordinator returned {len(reply.verdicts)} verdicts for {len(message.rollouts)} rollouts."
            raise MalformedMessage(said)
        return reply

    async def plan(self, message: PlanRequest) -> FetchPlan:
        return await self._call("/v1/plan", message, FetchPlan)

    async def fetched(self, receipt: TransferReceipt) -> HeartbeatReply:
        """Say that a version is here, and who sent it."""
        envelope = self._key.seal("receipt", receipt.to_bytes())
        return await self._call("/v1/fetched", Fetched(receipt=envelope), HeartbeatReply)

    async def why(self, message: Why) -> Explanations:
        """What became of this node's leases."""
        return await self._call("/v1/verdicts", message, Explanations)

    async def earnings(self) -> Earnings:
        """What the node's owner has earned."""
        return await self._call("/v1/earnings", EarningsRequest(), Earnings)

    async def payout(self, batch: int) -> PayoutReply:
        """What the node's owner gets in a batch, with its proof."""
        return await self._call("/v1/payouts", PayoutRequest(batch=batch), PayoutReply)

    async def state(self, statement: bytes) -> StatementReply:
        """Deliver what an owner has signed."""
        return StatementReply.from_bytes(await self._read("POST", "/v1/owners", statement, limits.MESSAGE_MAX_BYTES))

    async def appeal(self, appeal: bytes) -> AppealReply:
        """Deliver what a node or its owner has signed against a fault or a ban."""
        return AppealReply.from_bytes(await self._read("POST", "/v1/appeals", appeal, limits.MESSAGE_MAX_BYTES))

    async def cosign(self, note: bytes) -> CosignatureReply:
        """Deliver a checkpoint that a witness has signed."""
        data = await self._read("POST", "/v1/ledger/cosignatures", note, limits.MESSAGE_MAX_BYTES)
        return CosignatureReply.from_bytes(data)

    async def upload(self, data: bytes) -> Uploaded:
        """Send bytes that are thrown away."""
        return Uploaded.from_bytes(await self._read("POST", "/v1/probe/upload", data, limits.SMALL_REQUEST_MAX_BYTES))

    async def dial_me(self, message: Dial) -> Dialled:
        """Have this machine dialled, at the address that the coordinator sees."""
        return await self._call("/v1/probe/dial", message, Dialled)

    async def status(self) -> dict[str, Any]:
        """The round's figures, as everybody may read them."""
        return await self._json("/v1/status")

    async def leaderboard(self) -> list[dict[str, Any]]:
        """The nodes of the round, as everybody may read them."""
        rows: list[dict[str, Any]] = (await self._json("/v1/leaderboard")).get("nodes", [])
        return rows

    async def origins(self) -> OriginList:
        """Where chunks and documents can be had besides the coordinator."""
        return OriginList.from_bytes(await self._read("GET", "/v1/origins", None, limits.SMALL_REQUEST_MAX_BYTES))

    async def close(self) -> None:
        await self._client.aclose()

    def now_ms(self) -> int:
        """The coordinator's time; where both clocks agree as far as can be told, this machine's, which is finer."""
        offset_s = self.clock_offset_s or 0.0
        return int(1000 * (time.time() + (offset_s if abs(offset_s) > CLOCKS_AGREE_S else 0.0)))

    async def _json(self, path: str) -> dict[str, Any]:
        try:
            found = json.loads(await self._read("GET", path, None, limits.MESSAGE_MAX_BYTES))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Unreachable(f"{path} did not return JSON. Check that the address is the coordinator's.")
        return found

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
        patience_s = HELD_S + COORDINATORS.grace_s + max_bytes / COORDINATORS.rate_bytes_per_s
        try:
            with trio.fail_after(patience_s + len(body or b"") / SENT_BYTES_PER_S):
                async with self._client.stream(method, path, content=body) as response:
                    self.clock_offset_s = offset_s(response.headers.get("Date", ""), time.time())
                    data = await read_at_most(response, max_bytes)
        except trio.TooSlowError:
            raise Unreachable(f"The coordinator at {self.url} did not respond to {path} in time.") from None
        except (httpx.HTTPError, httpx.StreamError) as error:
            raise Unreachable(
                f"The coordinator at {self.url} does not respond ({type(error).__name__}: {error}).",
                hint="Check the address and this machine's network connection.",
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
        return Unreachable(
            f"{path} returned HTTP status {status} without a reason. Check that the address is the coordinator's."
        )
    return SwarmError.from_wire(reason)


def offset_s(date: str, answered_s: float) -> float | None:
    """How far a server's clock is ahead, by the whole second that its header names; an answer may have been held back
    for long, but is dated when it is sent."""
    try:
        named = parsedate_to_datetime(date).timestamp() + 0.5
    except (TypeError, ValueError, OverflowError):
        return None
    return named - answered_s


def _seconds(retry_after: str) -> float:
    """What the header asks for, within reason; its other form, a date, would need two clocks that agree."""
    return min(float(retry_after), RETRY_AFTER_MAX_S) if retry_after.isascii() and retry_after.isdigit() else 0.0
