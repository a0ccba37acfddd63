"""Messages between nodes and the coordinator over HTTP, beside leases and rollouts.

- Every request of a node is one signed envelope around a `Request`; replies are plain canonical messages.
- A request has its audience (round and path), a nonce that is accepted once, and the sender's clock.
- A machine that has not joined yet measures its connection with plain messages: `Uploaded`, `Dial`, `Dialled`.
- `/v1/probe/upload` receives bytes, discards them and returns their number: the sender measures its uplink.
- `/v1/probe/dial` makes the coordinator dial the address that the request came from, and no other, at a port; the
  listener must send the `word` of the request. So a machine can test only its own listener, and cannot scan others.
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
    """A node's registration, or a change of its price or addresses."""

    name: str = Field(min_length=1, max_length=limits.NAME_MAX_CHARS, pattern=r"^[^\x00]+$")
    """Any characters except NUL, which not every database can store."""
    price_micros_per_mtok: int = Field(ge=0, le=limits.PRICE_MAX_MICROS_PER_MTOK)
    addresses: tuple[HostPort, ...] = Field(max_length=limits.ADDRESSES_MAX)
    shares: bool = True
    """True if it uploads chunks; a node without an address does so over connections that it opens."""
    agent: str = Field(max_length=100)
    generation: int = Field(generation.CURRENT, ge=0, le=2**16)
    """The generation of the protocol that it uses."""
    delegation: bytes | None = Field(None, max_length=limits.STATEMENT_MAX_BYTES)
    """The owner's signed statement that the node works for the owner; without a first one it is its own owner."""

    @classmethod
    def from_bytes(cls, data: bytes, *, max_bytes: int = limits.MESSAGE_MAX_BYTES) -> Self:
        """Decode like any message, but check the generation first, so that a retired one gets its own error."""
        generation.require_current(canonical.read(data, max_bytes=max_bytes, max_items=limits.REGISTER_MAX_ITEMS))
        return super().from_bytes(data, max_bytes=max_bytes)


class Transfer(Message):
    """Bytes of verified chunks that a node has moved since it started, by source or destination."""

    from_peers: MovedBytes
    from_seeder: MovedBytes
    from_http: MovedBytes
    to_peers: MovedBytes


class Blame(Message):
    """A node's report that a peer sent bytes that do not match the chunk's name."""

    peer_id: PeerId
    chunk: Hex64
    got: Hex64


Stage = Literal["heard", "fetched", "loaded", "first_token"]
"""Stages of a version on a node: metadata names it; its files are complete; the engine has it; it is sampled."""


class Reached(Message):
    """A stage that a version has reached on a node; its age is a duration, so the node's clock need not be right."""

    version: int = Field(ge=1, le=limits.VERSION_MAX)
    stage: Stage
    ago_s: float = Field(ge=0, le=limits.REACHED_AGO_MAX_S)


class Heartbeat(Message):
    """A node's regular report: its version, phase, transfers and sampling rate, and the stages of new versions."""

    session: str = Field(pattern=r"^[0-9a-f]{16}$")
    """Random for each start of the agent, so that counters that restart at zero can be recognized."""
    version: int = Field(ge=0, le=limits.VERSION_MAX)
    phase: Literal["offline", "idle", "leased", "generating", "mirroring", "resting", "left"]
    """A mirroring node never samples: a version has arrived once it is fetched. A resting node requests no work for
    now, because its owner paused it. `left` is in the last heartbeat of an agent that ends."""
    tokens_per_s: float = Field(ge=0, le=limits.TOKENS_PER_S_MAX)
    transfer: Transfer
    blames: tuple[Blame, ...] = Field(max_length=16)
    reached: tuple[Reached, ...] = Field(max_length=limits.REACHED_MAX)


class HeartbeatReply(Message):
    """The answer to a heartbeat, with the newest version's number: a hint to refresh, never a reason to trust."""

    newest_version: int = Field(ge=0, le=limits.VERSION_MAX)
    heartbeat_s: float
    finished: bool
    """True if the round has ended; there is no more work."""


class VersionRequest(Message):
    """A node's request that waits until there is a version newer than `newer_than`."""

    newer_than: int = Field(ge=0, le=limits.VERSION_MAX)


class LeaseRequest(Message):
    """A node's request for work with the version that it has loaded."""

    version: int = Field(ge=1, le=limits.VERSION_MAX)
    groups: int = Field(ge=1, le=limits.LEASES_PER_REQUEST_MAX)
    continues: bool = False
    """True if its engine can continue a sample after a prefix: one that another node began, or an episode."""
    finishing: bool = False
    """True if it will load a newer version as soon as it has no episode of this one: it begins no more groups."""
    numerics: Numerics = ""
    """The node's class, by whose tolerances it is judged."""


Reason = Literal["", "ahead", "busy", "old_version", "numerics", "paused", "standby", "budget", "audits", "finished"]
"""Reasons for no work, in this order: enough is leased for the newest version; this node holds its maximum of leases;
this version gets no more work; the node's class is not admitted; the operator has paused the node; other nodes are
cheaper; no budget; too many claims wait for an audit; the round has ended."""


class LeaseReply(Message):
    """Work, or the reason for none and when to ask again; with the same hint as a heartbeat's reply."""

    leases: tuple[Lease, ...] = Field(max_length=limits.LEASES_PER_REQUEST_MAX)
    newest_version: int = Field(ge=0, le=limits.VERSION_MAX)
    reason: Reason
    retry_s: float
    stays: bool = False
    """True if there is more to measure of this version, or a next turn of an episode: ask again before loading a newer
    one."""


class ReturnLeases(Message):
    """A node's report of leases that it will not answer."""

    lease_ids: tuple[Hex32, ...] = Field(max_length=limits.LEASES_PER_REQUEST_MAX)


class LeaseProgress(Message):
    """A node's report on leases that take long: those that it holds, and fragments with the tokens since the last."""

    held: tuple[Hex32, ...] = Field(max_length=2 * limits.LEASES_PER_REQUEST_MAX)
    fragments: tuple[bytes, ...] = Field(max_length=limits.LEASES_PER_REQUEST_MAX)
    """Envelopes of the domain `fragment`."""


class LeaseProgressReply(Message):
    """The leases that have ended, and those whose fragments were stored."""

    gone: tuple[Hex32, ...]
    """The held leases that have ended: more samples for them would be wasted."""
    taken: tuple[Hex32, ...]
    """Leases whose fragment was stored. For others the node need send no more: their next fragments would not fit."""


class Submission(Message):
    """A request with signed rollouts, each an envelope of the domain `rollout`."""

    rollouts: tuple[bytes, ...] = Field(min_length=1, max_length=limits.LEASES_PER_REQUEST_MAX)


class Verdict(Message):
    """The outcome of a submitted rollout."""

    lease_id: str
    outcome: Literal["accepted", "already_accepted", "rejected"]
    code: str = ""
    message: str = ""
    tokens: int = 0
    credit_micros: int = 0
    evidence: RejectionEvidence | None = None
    """The evidence of a rejection."""


class SubmissionReply(Message):
    """The verdicts on the submitted rollouts, in the order of the request."""

    verdicts: tuple[Verdict, ...]
    leases: tuple[Lease, ...] = Field((), max_length=limits.LEASES_PER_REQUEST_MAX)
    """The next turns of the episodes whose turns were accepted, for this node, as far as they are known already."""


class PlanRequest(Message):
    """A node's request for a fetch plan, with its knowledge about its own place in the network."""

    version: int = Field(ge=1, le=limits.VERSION_MAX)
    observed: tuple[HostPort, ...] = Field((), max_length=limits.OBSERVERS_MAX)
    """The addresses at which observers saw a connection from its listening port, one for each observer of the plan that
    answered: equal ones mean that everybody sees the port at this address."""
    punched: tuple[PeerId, ...] = Field((), max_length=limits.DIALS_MAX)
    """The plan's `punches` that succeeded, except nodes whose last report already said so."""
    unpunched: tuple[PeerId, ...] = Field((), max_length=limits.DIALS_MAX)
    """The plan's `punches` that failed, with the same exception."""


class Peer(Message):
    """A source of chunks of the newest version."""

    peer_id: PeerId
    address: HostPort | Literal[""]
    """The address to dial; empty if it cannot be dialled and opens the connection itself."""
    also: tuple[HostPort, ...] = Field((), max_length=limits.ADDRESSES_MAX)
    """Further addresses: all are dialled, a moment apart, and the first that answers is used."""
    kind: Literal["peer", "seeder"]
    stripes: tuple[int, ...] = Field((), max_length=limits.STRIPES_MAX)
    """The stripes to request from it first; others are requested from it only if they are late."""

    @property
    def calls(self) -> bool:
        return not self.address


class FetchPlan(Message):
    """The sources to fetch a version from; every entry is a hint, since each chunk is checked by its hash.

    The n-th chunk of a version's manifest, counted from 0, belongs to stripe n modulo `stripes`.
    """

    stripes: int = Field(ge=1, le=limits.STRIPES_MAX)
    peers: tuple[Peer, ...] = Field(max_length=limits.PEERS_MAX)
    calls: tuple[Peer, ...] = Field((), max_length=limits.CALLS_MAX)
    """Nodes to which this one opens and keeps a connection: they fetch from it, and cannot dial it."""
    rate: float = Field(ge=0)
    """Bytes per second at which each node receives by the plan."""
    hops: int = Field(ge=1, le=limits.HOPS_MAX)
    """The most uplinks on a chunk's way to this node by the plan."""
    help_rate: float = Field(ge=0)
    """Bytes per second that this node may request from the seeder beyond its stripes; 0: no limit."""
    probe: Peer | None = None
    """A node to dial once, because nobody could lately; the receipt reports whether it is still so."""
    dialled: bool | None = None
    """True if most nodes that dialled the requesting node reached it; None if there is no report."""
    punches: tuple[Peer, ...] = Field((), max_length=limits.PUNCHES_MAX)
    """Nodes to dial from the listening port while they dial this one: neither can be dialled otherwise."""
    observers: tuple[Peer, ...] = Field((), max_length=limits.OBSERVERS_MAX)
    """Nodes to dial from the listening port, and to ask for the source address of the connection."""


class PeerUpload(Message):
    """The bytes of a version that a peer sent to the node."""

    peer_id: PeerId
    size_bytes: int = Field(ge=1, le=limits.TRANSFER_MAX_BYTES)
    busy_s: float = Field(ge=0, le=limits.FETCH_MAX_S)
    """Seconds in which it was sending: while it owed us chunks that it held."""


class TransferReceipt(Message):
    """A node's signed report of the peers that sent it a version, the duration, and the nodes that it could dial.

    It is sealed in an envelope of the domain `receipt`.
    """

    round_id: Hex64
    version: int = Field(ge=1, le=limits.VERSION_MAX)
    seconds: float = Field(ge=limits.FETCH_MIN_S, le=limits.FETCH_MAX_S)
    uploads: tuple[PeerUpload, ...] = Field(max_length=limits.PEERS_MAX)
    from_origins: MovedBytes = 0
    """Bytes received over HTTP, from servers that have no peer id."""
    answered: tuple[PeerId, ...] = Field((), max_length=limits.DIALS_MAX)
    """Nodes that answered a dial of the receiver."""
    unanswered: tuple[PeerId, ...] = Field((), max_length=limits.DIALS_MAX)
    """Nodes in the plan's `peers` or `calls` that the receiver could not dial."""
    missed_probe: PeerId | None = None
    """The plan's probe, if the receiver could not dial it."""


class Fetched(Message):
    """The sealed receipt of a version that is complete on a node's disk."""

    receipt: bytes = Field(max_length=limits.SMALL_REQUEST_MAX_BYTES)


def seal_request(key: NodeKey, *, round_id: str, path: str, nonce: bytes, now_ms: int, body: Message) -> bytes:
    """Return the bytes of a signed request."""
    request = Request(round_id=round_id, path=path, nonce=nonce, sent_ms=now_ms, body=body.to_bytes())
    return key.seal("request", request.to_bytes())


def open_request(data: bytes, *, round_id: str, path: str, now_ms: int) -> tuple[Signed, Request]:
    """Check a request's form, signature, audience and age; the caller checks that its nonce is new."""
    signed = open_envelope("request", data)
    request = Request.from_value(
        canonical.decode(signed.payload, max_bytes=limits.REQUEST_MAX_BYTES, max_items=items_max(Request))
    )
    if request.round_id != round_id:
        raise WrongAudience(
            "The request was signed for another round.",
            hint="Copy the operator's whole join string again.",
            breach=different("round_id", round_id, request.round_id),
        )
    if request.path != path:
        raise WrongAudience(
            "The request was signed for another address.",
            hint="Sign the address that you call, from /v1/ on.",
            breach=different("path", path, request.path[:80]),
        )
    if abs(now_ms - request.sent_ms) > limits.CLOCK_SKEW_MAX_S * 1000:
        ahead_ms = request.sent_ms - now_ms
        raise RequestExpired(
            f"The request's time is {abs(ahead_ms) / 1000:.0f} s {'ahead of' if ahead_ms > 0 else 'behind'} the "
            "coordinator's clock.",
            hint="Set this machine's clock (NTP) and try again.",
            breach=Breach("sent_ms", f"{now_ms}", f"{request.sent_ms}", tolerance=f"{limits.CLOCK_SKEW_MAX_S} s"),
        )
    return signed, request


DIAL_S = 3.0
"""Seconds that a dial without an answer takes; a refused dial is reported no sooner, so its speed reveals nothing."""


class Uploaded(Message):
    """The number of bytes that arrived."""

    size_bytes: int = Field(ge=0, le=limits.PROBE_MAX_BYTES)


class Dial(Message):
    """A request to dial the sender at a port."""

    port: int = Field(ge=1, le=65535)
    word: Hex32


class Dialled(Message):
    """The result of a dial."""

    reached: bool
    proxied: bool
    """True if the request came through a proxy, so that there was no address to dial."""
