"""Requests: signed for one round, one address and one moment, and every field within its bounds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import limits
from protocol.errors import BadSignature, MalformedMessage, RequestExpired, SwarmError, WrongAudience
from protocol.wire import canonical, generation
from protocol.wire.message import Message
from protocol.wire.signing import NodeKey
from protocol.work.appeal import Appeal
from protocol.work.auditing import Why
from protocol.work.messages import (
    FetchPlan,
    Heartbeat,
    LeaseRequest,
    PlanRequest,
    Register,
    Request,
    ReturnLeases,
    Submission,
    TransferReceipt,
    open_request,
    seal_request,
)

KEY = NodeKey(b"n" * 32)
ROUND, OTHER_ROUND = "a" * 64, "b" * 64
PATH = "/v1/leases"
NONCE = bytes(limits.NONCE_BYTES)
NOW_MS = 1_700_000_000_000
SKEW_MS = limits.CLOCK_SKEW_MAX_S * 1000
BODY = LeaseRequest(version=1, groups=1)

TRANSFER = {"from_peers": 0, "from_seeder": 0, "from_http": 0, "to_peers": 0}
BLAME = {"peer_id": KEY.node_id, "chunk": "c" * 64, "got": "d" * 64}
REACHED = {"version": 1, "stage": "first_token", "ago_s": 0.5}
PEER = {"peer_id": KEY.node_id, "address": "127.0.0.1:4001", "kind": "peer", "stripes": [0], "also": []}
CALLER = PEER | {"address": ""}
FIELDS: dict[type[Message], dict[str, Any]] = {
    Register: {
        "generation": generation.CURRENT,
        "name": "n",
        "price_micros_per_mtok": 1,
        "addresses": ["127.0.0.1:4001"],
        "shares": True,
        "agent": "",
        "delegation": None,
    },
    Heartbeat: {
        "session": "0" * 16, "version": 0, "phase": "idle", "tokens_per_s": 0.0, "transfer": TRANSFER,
        "blames": [BLAME], "reached": [REACHED],
    },
    LeaseRequest: {
        "version": 1, "groups": 1, "continues": True, "finishing": True, "numerics": "torch/fp32/cpu",
    },
    PlanRequest: {
        "version": 1, "observed": ["203.0.113.5:4001"], "punched": [KEY.node_id], "unpunched": [KEY.node_id],
    },
    FetchPlan: {
        "stripes": 1, "peers": [PEER, CALLER], "calls": [PEER], "rate": 1e6, "hops": 2, "help_rate": 1e5, "probe": PEER,
        "dialled": True,
        "punches": [PEER], "observers": [PEER],
    },
    TransferReceipt: {
        "round_id": ROUND, "version": 1, "seconds": 1.0,
        "uploads": [{"peer_id": KEY.node_id, "size_bytes": 1, "busy_s": 0.5}],
        "answered": [KEY.node_id], "unanswered": [KEY.node_id], "missed_probe": KEY.node_id, "from_origins": 0,
    },
    ReturnLeases: {"lease_ids": ["f" * 32]},
    Submission: {"rollouts": [b"r"]},
}  # fmt: skip


def sealed(path: str = PATH, round_id: str = ROUND, now_ms: int = NOW_MS) -> bytes:
    return seal_request(KEY, round_id=round_id, path=path, nonce=NONCE, now_ms=now_ms, body=BODY)


def test_a_request_arrives_as_it_was_signed() -> None:
    signed, request = open_request(sealed(), round_id=ROUND, path=PATH, now_ms=NOW_MS)
    assert signed.signer == KEY.node_id
    assert (request.nonce, request.sent_ms) == (NONCE, NOW_MS)
    assert LeaseRequest.from_bytes(request.body) == BODY


def test_a_request_for_one_address_is_refused_at_another() -> None:
    with pytest.raises(WrongAudience):
        open_request(sealed(path="/v1/leases/return"), round_id=ROUND, path=PATH, now_ms=NOW_MS)


def test_a_request_for_another_round_is_refused() -> None:
    with pytest.raises(WrongAudience):
        open_request(sealed(round_id=OTHER_ROUND), round_id=ROUND, path=PATH, now_ms=NOW_MS)


@pytest.mark.parametrize("late_ms", [-SKEW_MS, 0, SKEW_MS])
def test_a_clock_may_differ_a_little(late_ms: int) -> None:
    open_request(sealed(), round_id=ROUND, path=PATH, now_ms=NOW_MS + late_ms)


@pytest.mark.parametrize(
    ("late_ms", "said"),
    [(-600_000, "600 s ahead of"), (600_000, "600 s behind"), (-SKEW_MS - 1, "ahead"), (SKEW_MS + 1, "behind")],
)
def test_an_old_request_and_one_from_the_future_are_refused(late_ms: int, said: str) -> None:
    with pytest.raises(RequestExpired, match=said):
        open_request(sealed(), round_id=ROUND, path=PATH, now_ms=NOW_MS + late_ms)


def test_a_stored_rollout_cannot_be_turned_into_a_request() -> None:
    request = Request(round_id=ROUND, path=PATH, nonce=NONCE, sent_ms=NOW_MS, body=BODY.to_bytes())
    with pytest.raises(BadSignature):
        open_request(KEY.seal("rollout", request.to_bytes()), round_id=ROUND, path=PATH, now_ms=NOW_MS)


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": b""},
        {"nonce": bytes(limits.NONCE_BYTES + 1)},
        {"round_id": "A" * 64},
        {"round_id": "a" * 64 + "\n"},
        {"path": "/" * 101},
        {"sent_ms": 1.0},
        {"more": 1},
    ],
    ids=str,
)
def test_a_request_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    request = {"round_id": ROUND, "path": PATH, "nonce": NONCE, "sent_ms": NOW_MS, "body": b""} | change
    with pytest.raises(MalformedMessage):
        open_request(KEY.seal("request", canonical.encode(request)), round_id=ROUND, path=PATH, now_ms=NOW_MS)


@given(st.binary(max_size=200))
def test_a_signed_garbage_is_refused_by_name(payload: bytes) -> None:
    with pytest.raises(SwarmError):
        open_request(KEY.seal("request", payload), round_id=ROUND, path=PATH, now_ms=NOW_MS)


@pytest.mark.parametrize("kind", FIELDS)
def test_every_kind_of_message_has_a_good_example(kind: type[Message]) -> None:
    kind.from_bytes(canonical.encode(FIELDS[kind]))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Register, {"name": ""}),
        (Register, {"delegation": bytes(limits.STATEMENT_MAX_BYTES + 1)}),
        (Register, {"delegation": ""}),
        (Register, {"name": "n" * 41}),
        (Register, {"price_micros_per_mtok": -1}),
        (Register, {"price_micros_per_mtok": limits.PRICE_MAX_MICROS_PER_MTOK + 1}),
        (Register, {"price_micros_per_mtok": 2**64 - 1}),
        (Register, {"addresses": ["127.0.0.1:1"] * (limits.ADDRESSES_MAX + 1)}),
        (Register, {"addresses": ["/ip4/127.0.0.1/tcp/4001"]}),
        (Register, {"addresses": ["host:1 "]}),
        (Register, {"addresses": ["user@host:1"]}),
        (Register, {"addresses": ["host:123456"]}),
        (Register, {"addresses": ["h" * 256 + ":1"]}),
        (Heartbeat, {"session": "0" * 17}),
        (Heartbeat, {"session": "0" * 15 + "\n"}),
        (Heartbeat, {"tokens_per_s": -1.0}),
        (Heartbeat, {"version": limits.VERSION_MAX + 1}),
        (Heartbeat, {"version": True}),
        (Heartbeat, {"phase": "sleeping"}),
        (Heartbeat, {"transfer": TRANSFER | {"from_peers": -1}}),
        (Heartbeat, {"transfer": TRANSFER | {"to_peers": 2**63}}),  # no 64-bit column holds it, nor the sum of two
        (Heartbeat, {"transfer": TRANSFER | {"to_peers": 2**62}}),
        (Heartbeat, {"blames": [BLAME] * 17}),
        (Heartbeat, {"blames": [BLAME | {"chunk": "C" * 64}]}),
        (Heartbeat, {"reached": [REACHED] * (limits.REACHED_MAX + 1)}),
        (Heartbeat, {"reached": [REACHED | {"version": 0}]}),
        (Heartbeat, {"reached": [REACHED | {"stage": "sold"}]}),
        (Heartbeat, {"reached": [REACHED | {"ago_s": -0.001}]}),  # in the future
        (Heartbeat, {"reached": [REACHED | {"ago_s": 1e308}]}),
        (LeaseRequest, {"version": 0}),
        (LeaseRequest, {"version": 2**64 - 1}),
        (LeaseRequest, {"groups": 0}),
        (LeaseRequest, {"groups": limits.LEASES_PER_REQUEST_MAX + 1}),
        (PlanRequest, {"version": 0}),
        (FetchPlan, {"stripes": 0}),
        (FetchPlan, {"peers": [PEER] * (limits.PEERS_MAX + 1)}),
        (FetchPlan, {"calls": [PEER] * (limits.CALLS_MAX + 1)}),
        (FetchPlan, {"probe": PEER | {"address": "nowhere"}}),
        (TransferReceipt, {"seconds": 0.0}),
        (TransferReceipt, {"answered": [KEY.node_id] * (limits.DIALS_MAX + 1)}),
        (TransferReceipt, {"unanswered": [KEY.node_id] * (limits.DIALS_MAX + 1)}),
        (TransferReceipt, {"unanswered": ["me"]}),
        (TransferReceipt, {"missed_probe": ""}),
        (ReturnLeases, {"lease_ids": ["0" * 32 + "\0"]}),
        (ReturnLeases, {"lease_ids": ["f" * 32] * (limits.LEASES_PER_REQUEST_MAX + 1)}),
        (Submission, {"rollouts": []}),
        (Submission, {"rollouts": [b""] * (limits.LEASES_PER_REQUEST_MAX + 1)}),
        (Submission, {"rollouts": ["text"]}),
    ],
    ids=str,
)
def test_a_field_out_of_bounds_is_refused(kind: type[Message], change: dict[str, Any]) -> None:
    with pytest.raises(MalformedMessage):
        kind.from_bytes(canonical.encode(FIELDS[kind] | change))


@pytest.mark.parametrize("about", ["a" * 31, "a" * 48, "a" * 65, "A" * 32, "a" * 32 + "\n"], ids=len)
@pytest.mark.parametrize(
    ("message", "others"), [(Why, {}), (Appeal, {"kind": "appeal", "round_id": ROUND, "reason": ""})]
)
def test_a_refusal_names_the_field_that_is_neither_a_lease_nor_a_claim(
    message: type[Message], others: dict[str, Any], about: str
) -> None:
    for good in ("a" * 32, "a" * 64):
        message.from_bytes(canonical.encode({**others, "about": good}))
    with pytest.raises(MalformedMessage, match=f"^{message.__name__}: about: "):
        message.from_bytes(canonical.encode({**others, "about": about}))
