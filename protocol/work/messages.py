"""What nodes and the coordinator say to each other over HTTP, beside leases and rollouts.

- Every request of a node is one signed envelope around a `Request`; replies are plain canonical messages.
- A request names its audience (round and path), carries a nonce that works once, and the sender's clock.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints

from protocol import limits
from protocol.breach import Breach, different
from protocol.errors import RequestExpired, WrongAudience
from protocol.ids import Hex32, Hex64
from protocol.wire import canonical, generation
from protocol.wire.message import Message, items_max
from protocol.wire.signing import NodeKey, Signed, open_envelope
from protocol.work.episode import Name
from protocol.work.evidence import RejectionEvidence
from protocol.work.lease import Lease, Numerics

PeerId = Annotated[str, StringConstraints(pattern=r"^12D3Koo[1-9A-HJ-NP-Za-km-z]{45}$")]
HostPort = Annotated[str, StringConstraints(pattern=r"^[0-9A-Za-z.:\[\]-]{1,255}:[0-9]{1,5}$")]
MovedBytes = Annotated[int, Field(ge=0, le=limits.TRANSFER_MAX_BYTES)]


class Request(Message):
    """The signed part of every request."""

    round_id: Hex64
    path: str = Field(max_length=100)
    nonce: bytes = Field(min_length=limits.NONCE_BYTES, max_length=limits.NONCE_BYTES)
    sent_ms: int
    body: bytes = Field(max_length=limits.MESSAGE_MAX_BYTES)


class Register(Message):
    """A node introduces itself, or changes its price or addresses."""

    name: str = Field(min_length=1, max_length=limits.NAME_MAX_CHARS, pattern=r"^[^\x00]+$")
    """Of any characters but NUL, which not every database can keep."""
    price_micros_per_mtok: int = Field(ge=0, le=limits.PRICE_MAX_MICROS_PER_MTOK)
    addresses: tuple[HostPort, ...] = Field(max_length=limits.ADDRESSES_MAX)
    shares: bool = True
    """Whether it passes chunks on; one without an address does so over connections that it opens."""
    agent: str = Field(max_length=100)
    generation: int = Field(generation.CURRENT, ge=0, le=2**16)
    """Which generation of the protocol it speaks."""
    delegation: bytes | None = Field(None, max_length=limits.STATEMENT_MAX_BYTES)
    """Its owner's word that it works for them; without one, and before the first, it is its own."""

    @classmethod
    def from_bytes(cls, data: bytes, *, max_bytes: int = limits.MESSAGE_MAX_BYTES) -> Self:
        """As any message; but one of a retired generation is told so, whatever else it looks like."""
        generation.require_current(canonical.read(data, max_bytes=max_bytes, max_items=limits.REGISTER_MAX_ITEMS))
        return super().from_bytes(data, max_bytes=max_bytes)


class Transfer(Message):
    """Bytes of verified chunks a node has fetched since it started, by where they came from."""

    from_peers: MovedBytes
    from_seeder: MovedBytes
    from_http: MovedBytes
    to_peers: MovedBytes


class Blame(Message):
    """A node saw a peer send bytes that are not what their name promises."""

    peer_id: PeerId
    chunk: Hex64
    got: Hex64


Stage = Literal["heard", "fetched", "loaded", "first_token"]
"""How far a version is on a node: trust metadata names it; its files are whole; it is in the engine; it is sampled."""


class Reached(Message):
    """How long ago a version came how far on a node, by the node's stopwatch: its clock need not be right."""

    version: int = Field(ge=1, le=limits.VERSION_MAX)
    stage: Stage
    ago_s: float = Field(ge=0, le=limits.REACHED_AGO_MAX_S)


class Heartbeat(Message):
    """A node is alive: what it holds, does and moved, how fast it samples, and how far new versions have come."""

    session: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Random per start of the agent, so that counters that begin again at zero are told apart."""
    version: int = Field(ge=0, le=limits.VERSION_MAX)
    phase: Literal["offline", "idle", "leased", "generating", "mirroring", "resting"]
    """Who mirrors never samples: for it a version has arrived when it is fetched. Who rests takes no work
    for now, because its owner says so."""
    tokens_per_s: float = Field(ge=0, le=limits.TOKENS_PER_S_MAX)
    transfer: Transfer
    blames: tuple[Blame, ...] = Field(max_length=16)
    reached: tuple[Reached, ...] = Field(max_length=limits.REACHED_MAX)


class HeartbeatReply(Message):
    """The newest version's number: a hint to refresh, never a reason to trust."""

    newest_version: int = Field(ge=0, le=limits.VERSION_MAX)
    heartbeat_s: float
    finished: bool
    """The round has ended; there is no more work."""


class VersionRequest(Message):
    """A node asks to be told when there is a newer version than the one it has heard of."""

    newer_than: int = Field(ge=0, le=limits.VERSION_MAX)


class LeaseRequest(Message):
    """A node asks for work for the version it has loaded."""

    version: int = Field(ge=1, le=limits.VERSION_MAX)
    groups: int = Field(ge=1, le=limits.LEASES_PER_REQUEST_MAX)
    continues: bool = False
    """Whether its engine can go on where another stopped."""
    numerics: Numerics = ""
    """What it computes with, and is judged by."""
    environments: tuple[Name, ...] = Field((), max_length=limits.ENVIRONMENTS_MAX)
    """Those that its engine can play; without the round's it gets `unknown_environment` and no work."""


Reason = Literal["", "ahead", "busy", "old_version", "numerics", "paused", "standby", "budget", "audits", "finished"]
"""Why there is no work: enough is under way for the newest version; this node holds as many leases as it may; this
version gives no more; what the node computes with is not admitted; the operator has paused it; others do it for less;
no money; too much waits for an audit; the end."""


class LeaseReply(Message):
    """Work, or why there is none and when to ask again; with the same hint as a heartbeat's reply."""

    leases: tuple[Lease, ...] = Field(max_length=limits.LEASES_PER_REQUEST_MAX)
    newest_version: int = Field(ge=0, le=limits.VERSION_MAX)
    reason: Reason
    retry_s: float
    stays: bool = False
    """There is more to measure of this version: ask again before loading a newer one."""


class ReturnLeases(Message):
    """A node gives leases back that it will not answer."""

    lease_ids: tuple[Hex32, ...] = Field(max_length=limits.LEASES_PER_REQUEST_MAX)


class LeaseProgress(Message):
    """A node tells of leases that take it long: those that it has, and what it has sampled since it last told."""

    held: tuple[Hex32, ...] = Field(max_length=2 * limits.LEASES_PER_REQUEST_MAX)
    fragments: tuple[bytes, ...] = Field(max_length=limits.LEASES_PER_REQUEST_MAX)
    """Envelopes of the domain `fragment`."""


class LeaseProgressReply(Message):
    """What a node need not go on with, and what was kept."""

    gone: tuple[Hex32, ...]
    """Of the leases held, those that have ended: what is sampled for them is in vain."""
    taken: tuple[Hex32, ...]
    """Leases whose fragment was kept. Of others the node need tell no more: their next fragments would not fit."""


class Submission(Message):
    """Signed rollouts, each an envelope of the domain `rollout`."""

    rollouts: tuple[bytes, ...] = Field(min_length=1, max_length=limits.LEASES_PER_REQUEST_MAX)


class Verdict(Message):
    """What became of one submitted rollout."""

    lease_id: str
    outcome: Literal["accepted", "already_accepted", "rejected"]
    code: str = ""
    message: str = ""
    tokens: int = 0
    credit_micros: int = 0
    evidence: RejectionEvidence | None = None
    """Of a rejection."""


class SubmissionReply(Message):
    """One verdict per rollout, in the order they were sent."""

    verdicts: tuple[Verdict, ...]


class PlanRequest(Message):
    """A node asks from whom it may fetch a version, and reports what it knows of its place in the network."""

    version: int = Field(ge=1, le=limits.VERSION_MAX)
    observed: tuple[HostPort, ...] = Field((), max_length=limits.OBSERVERS_MAX)
    """Addresses from which a connection out of its listening port came, one for each of the plan's observers that
    answered: equal ones say that everybody sees the port at this address."""
    punched: tuple[PeerId, ...] = Field((), max_length=limits.DIALS_MAX)
    """Of the plan's `punches` those that succeeded, unless the last report about that node said so, too."""
    unpunched: tuple[PeerId, ...] = Field((), max_length=limits.DIALS_MAX)
    """Those that failed, likewise."""


class Peer(Message):
    """Where chunks of the newest version can be had."""

    peer_id: PeerId
    address: HostPort | Literal[""]
    """Where to dial it; empty if it cannot be dialled, and opens the connection itself."""
    also: tuple[HostPort, ...] = Field((), max_length=limits.ADDRESSES_MAX)
    """Where else it may be dialled: all are tried, a moment apart, and whichever answers first is taken."""
    kind: Literal["peer", "seeder"]
    stripes: tuple[int, ...] = Field((), max_length=limits.STRIPES_MAX)
    """The stripes to ask of it first; of the others it is asked when they are late."""

    @property
    def calls(self) -> bool:
        return not self.address


class FetchPlan(Message):
    """From whom to fetch; every entry is a hint, since chunks prove themselves.

    The n-th chunk of a version's manifest, counted from 0, belongs to stripe n modulo `stripes`.
    """

    stripes: int = Field(ge=1, le=limits.STRIPES_MAX)
    peers: tuple[Peer, ...] = Field(max_length=limits.PEERS_MAX)
    calls: tuple[Peer, ...] = Field((), max_length=limits.CALLS_MAX)
    """Nodes to open a connection to and keep it: they are to ask this one, and cannot dial it."""
    rate: float = Field(ge=0)
    """Bytes per second at which the plan would have everybody receive."""
    hops: int = Field(ge=1, le=limits.HOPS_MAX)
    """How many uplinks the plan has a chunk pass on its way to this node, at the most."""
    help_rate: float = Field(ge=0)
    """Bytes per second that this node may ask of the seeder beyond its stripes; 0: as much as it likes."""
    probe: Peer | None = None
    """A node to dial once: nobody could lately, and the receipt is to say whether that is still so."""
    dialled: bool | None = None
    """Whether most of those who tried to dial the node that asks could; None if nobody has said so."""
    punches: tuple[Peer, ...] = Field((), max_length=limits.PUNCHES_MAX)
    """Nodes to dial from the listening port, as they do at the same time: neither can be dialled otherwise."""
    observers: tuple[Peer, ...] = Field((), max_length=limits.OBSERVERS_MAX)
    """Nodes to dial from the listening port, and to ask for the address that the connection came from."""


class PeerUpload(Message):
    """What one node sent us of a version."""

    peer_id: PeerId
    size_bytes: int = Field(ge=1, le=limits.TRANSFER_MAX_BYTES)
    busy_s: float = Field(ge=0, le=limits.FETCH_MAX_S)
    """How long it was sending: while it owed us chunks that it held."""


class TransferReceipt(Message):
    """A node's signed word on who sent it a version, how long that took, and whom it could dial.

    It is sealed in an envelope of the domain `receipt`.
    """

    round_id: Hex64
    version: int = Field(ge=1, le=limits.VERSION_MAX)
    seconds: float = Field(ge=limits.FETCH_MIN_S, le=limits.FETCH_MAX_S)
    uploads: tuple[PeerUpload, ...] = Field(max_length=limits.PEERS_MAX)
    from_origins: MovedBytes = 0
    """What came over HTTP, from servers that have no peer id."""
    answered: tuple[PeerId, ...] = Field((), max_length=limits.DIALS_MAX)
    """Who answered a dial of the receiver's."""
    unanswered: tuple[PeerId, ...] = Field((), max_length=limits.DIALS_MAX)
    """Of those whom the plan names to ask or to call, who was dialled in vain."""
    missed_probe: PeerId | None = None
    """The plan's probe, if it was dialled in vain."""


class Fetched(Message):
    """A version is complete on a node's disk: the sealed receipt for it."""

    receipt: bytes = Field(max_length=limits.SMALL_REQUEST_MAX_BYTES)


def seal_request(key: NodeKey, *, round_id: str, path: str, nonce: bytes, now_ms: int, body: Message) -> bytes:
    """The bytes of one signed request."""
    request = Request(round_id=round_id, path=path, nonce=nonce, sent_ms=now_ms, body=body.to_bytes())
    return key.seal("request", request.to_bytes())


def open_request(data: bytes, *, round_id: str, path: str, now_ms: int) -> tuple[Signed, Request]:
    """Check a request's form, signature, audience and age; whether its nonce is new is for the caller to know."""
    signed = open_envelope("request", data)
    request = Request.from_value(
        canonical.decode(signed.payload, max_bytes=limits.REQUEST_MAX_BYTES, max_items=items_max(Request))
    )
    if request.round_id != round_id or request.path != path:
        raise WrongAudience(
            "The request was signed for another round or another address.",
            hint="Copy the operator's whole join string again.",
            breach=different(
                "round_id, path", f"{round_id[:16]}…, {path}", f"{request.round_id[:16]}…, {request.path[:80]}"
            ),
        )
    if abs(now_ms - request.sent_ms) > limits.CLOCK_SKEW_MAX_S * 1000:
        raise RequestExpired(
            f"The request was sent {(now_ms - request.sent_ms) / 1000:+.0f} s from the coordinator's clock.",
            hint="Set this machine's clock (NTP) and try again.",
            breach=Breach("sent_ms", f"{now_ms}", f"{request.sent_ms}", tolerance=f"{limits.CLOCK_SKEW_MAX_S} s"),
        )
    return signed, request
