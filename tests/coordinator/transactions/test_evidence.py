"""Every code that intake rejects with brings the whole evidence: a new code fails here until it does."""

from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.transactions import checked_rollouts, claims, registry
from ledger.tables import balances_table
from protocol import errors, limits
from protocol.errors import ERRORS, SwarmError
from protocol.policy import chunks
from protocol.wire import canonical
from protocol.wire.signing import NodeKey
from protocol.work import evidence
from protocol.work.evidence import EXACT, RULES, VALIDATOR, RejectionEvidence, TokenPlace
from protocol.work.lease import Lease
from protocol.work.messages import PlanRequest, open_request, seal_request
from protocol.work.rollout import Sample, pack_logprobs, pack_tokens
from tests.coordinator.world import END, ROUND, VOCAB, World, answer, claim

ELSEWHERE = {
    kind.code
    for kind in (
        SwarmError, errors.NotAuthorised, errors.AgentTooOld, errors.OwnerBanned, errors.OwnerConflict,
        errors.UnknownOwner, errors.StatementStale, errors.TooManyStatements, errors.PayoutFailed,
        errors.PriceTooHigh, errors.NotInvited, errors.KeyRefused, errors.KeyBudgetUsed,
        errors.FragmentMismatch, errors.UnknownTask, errors.UnknownChunk, errors.NotFound, errors.OutOfOrder,
        errors.ChunkMismatch, errors.PeerFault, errors.ManifestInvalid, errors.PatchInvalid, errors.UntrustedRoot,
        errors.UntrustedMetadata, errors.RolledBack, errors.MetadataExpired, errors.LedgerForked,
        errors.CheckpointInvalid, errors.ProofInvalid, errors.NotWitnessed, errors.DiskFull, errors.EngineFailed,
        errors.EngineNotStarted,
        errors.AuditFailed, errors.VerifierFailed, errors.VerifierDown, errors.Unreachable, errors.Overloaded,
        errors.WrongAddress,
        errors.AnswerChanged, errors.ConfigInvalid, errors.FieldRefused, errors.Misdirected, errors.KeyInUse,
    )
}  # fmt: skip
"""No submitted rollout is rejected with these; `disk_full` and `overloaded` say when to send it again."""

KEY = NodeKey(b"n" * 32)
PATH = "/v1/rollouts"

SOKOBAN = 3
"""The place among the games there of one in which the environment answers every turn."""


def of_claim(code: str, change: dict[str, object]) -> Callable[[World], RejectionEvidence]:
    def provoke(world: World) -> RejectionEvidence:
        key = world.join(1)
        return rejected(world, key, answer(key, world.lease(key), **change), code)

    return provoke


def rejected(world: World, key: NodeKey, envelope: bytes, code: str) -> RejectionEvidence:
    verdict = world.submit(key, envelope)
    assert verdict.code == code
    assert verdict.evidence is not None
    return verdict.evidence


def a_sample(tokens: list[int], logprobs: list[float], finish: str = "stop") -> dict[str, object]:
    made = Sample.from_value({"tokens": pack_tokens(tokens), "logprobs": pack_logprobs(logprobs), "finish": finish})
    return {"samples": (made, made)}


def raw(code: str, make: Callable[[NodeKey, Lease], bytes]) -> Callable[[World], RejectionEvidence]:
    def provoke(world: World) -> RejectionEvidence:
        key = world.join(1)
        return rejected(world, key, make(key, world.lease(key)), code)

    return provoke


def bad_signature(key: NodeKey, lease: Lease) -> bytes:
    envelope = answer(key, lease)
    return envelope[:-1] + bytes([envelope[-1] ^ 1])


def of_another(world: World) -> RejectionEvidence:
    owner, thief = world.join(1), world.join(2)
    return rejected(world, thief, answer(thief, world.lease(owner)), "lease_of_another")


def conflict(world: World) -> RejectionEvidence:
    key = world.join(1)
    lease = world.lease(key)
    world.submit(key, answer(key, lease))
    return rejected(world, key, answer(key, lease, **a_sample([10, 10, END], [0.0] * 3)), "lease_conflict")


def closed(world: World) -> RejectionEvidence:
    key = world.join(1)
    lease = world.lease(key)
    world.now_ms += world.terms.timeout_ms
    return rejected(world, key, answer(key, lease), "lease_closed")


def stale(world: World) -> RejectionEvidence:
    slow, quick = world.join(1), world.join(2)
    lease = world.lease(slow)
    world.publish(2, 1)
    for number in (1, 2, 3):
        world.earn(quick, version=2)
        world.earn(quick, version=2)
        world.train(number)
    return rejected(world, slow, answer(slow, lease), "stale_version")


def poor(world: World) -> RejectionEvidence:
    key = world.join(1)
    lease = world.lease(key)
    world.run(lambda connection: connection.execute(sa.update(balances_table).values(micros=1)))
    return rejected(world, key, answer(key, lease), "budget_exhausted")


def unread(world: World) -> RejectionEvidence:
    """The answer behind three that are garbage, in one request."""
    key = world.join(1)
    envelopes = [b"garbage", b"garbage", b"garbage", answer(key, world.lease(key))]
    read = checked_rollouts.read_rollouts(key.node_id, envelopes)
    verdicts = world.run(claims.receive_rollouts, key.node_id, read, judge=world.judge, now_ms=world.now_ms)
    assert verdicts[3].code == "not_read"
    found: RejectionEvidence = verdicts[3].evidence
    return found


def on_wire(error: SwarmError) -> RejectionEvidence:
    """Return the error of a rejected request, as a node reads it."""
    got = SwarmError.from_wire(canonical.decode(canonical.encode(error.to_wire())))
    return evidence.build_evidence(got, envelope=b"a rollout", lease_id="1" * 32)


def refused(act: Callable[[World], object], code: str) -> Callable[[World], RejectionEvidence]:
    def provoke(world: World) -> RejectionEvidence:
        with pytest.raises(SwarmError) as caught:
            act(world)
        assert caught.value.code == code
        return on_wire(caught.value)

    return provoke


def request(*, round_id: str = ROUND, now_ms: int = 0) -> bytes:
    body = PlanRequest(version=1)
    return seal_request(KEY, round_id=round_id, path=PATH, nonce=bytes(limits.NONCE_BYTES), now_ms=now_ms, body=body)


def opening(**change: Any) -> Callable[[World], object]:
    return lambda world: open_request(request(**change), round_id=ROUND, path=PATH, now_ms=0)


def spent_twice(world: World) -> None:
    for _ in range(2):
        world.run(registry.spend_nonce, KEY.node_id, bytes(limits.NONCE_BYTES), 0)


def revoked(world: World) -> None:
    key = world.join(1)
    world.run(lambda connection: connection.exec_driver_sql("UPDATE nodes SET revoked_ms = 1"))
    world.run(registry.require_node, key.node_id)


CASES: dict[str, tuple[Callable[[World], RejectionEvidence], bool]] = {
    "message_too_large": (raw("message_too_large", lambda *_: bytes(10**7)), False),
    "malformed_message": (raw("malformed_message", lambda *_: b"\xff" * 100), False),
    "not_canonical": (raw("not_canonical", lambda key, lease: b"\xc7"), False),
    "not_read": (unread, False),
    "non_finite_number": (refused(lambda _world: canonical.encode(float("nan")), "non_finite_number"), False),
    "bad_signature": (raw("bad_signature", bad_signature), False),
    "wrong_audience": (refused(opening(round_id="b" * 64), "wrong_audience"), False),
    "request_expired": (refused(opening(now_ms=10**9), "request_expired"), False),
    "nonce_replayed": (refused(spent_twice, "nonce_replayed"), False),
    "unknown_node": (refused(lambda world: world.run(registry.require_node, KEY.node_id), "unknown_node"), False),
    "key_revoked": (refused(revoked, "key_revoked"), False),
    "unknown_lease": (of_claim("unknown_lease", {"lease_id": "f" * 32}), False),
    "lease_of_another": (of_another, False),
    "lease_closed": (closed, False),
    "lease_mismatch": (of_claim("lease_mismatch", {"lease_digest": "0" * 64}), False),
    "lease_conflict": (conflict, False),
    "stale_version": (stale, False),
    "tokens_invalid": (of_claim("tokens_invalid", a_sample([10, VOCAB, END], [0.0] * 3)), True),
    "logprobs_invalid": (of_claim("logprobs_invalid", a_sample([10, END], [-0.1, 0.5])), True),
    "budget_exhausted": (poor, False),
}  # fmt: skip
"""The ways in which each code comes about, and whether single tokens are at fault."""


def test_every_code_there_is_has_its_evidence_or_is_none_of_intakes() -> None:
    assert set(ERRORS) == RULES.keys() | ELSEWHERE, "add a code of a claim's check to RULES, any other to ELSEWHERE"
    assert not RULES.keys() & ELSEWHERE
    assert CASES.keys() == RULES.keys(), "each code of RULES has a case"


@pytest.mark.parametrize("code", RULES)
def test_a_rejection_brings_all_its_evidence(world: World, code: str) -> None:
    provoke, has_places = CASES[code]
    found = provoke(world)
    assert (found.code, found.step, found.validator) == (code, RULES[code].step, VALIDATOR)
    assert len(found.claim_id) == 64
    assert all([found.field, found.expected, found.observed, found.tolerance])
    assert found.expected != found.observed
    assert found.command.startswith("swarm-node why ")
    assert found.command.endswith(" --replay") == RULES[code].replays
    assert bool(found.positions) == has_places
    assert RejectionEvidence.from_bytes(found.to_bytes()) == found


def test_the_evidence_names_claim_field_and_place(world: World) -> None:
    key = world.join(1)
    one, two = world.offer(key, groups=2).leases
    envelope = answer(key, one, **a_sample([10, 2**32 - 1, END], [0.0] * 3))
    found = rejected(world, key, envelope, "tokens_invalid")
    payload: Any = canonical.decode(envelope)
    assert found.claim_id == chunks.digest(payload["payload"])
    assert (found.field, found.expected, found.observed) == ("samples.0.tokens", f"below {VOCAB}", "4294967295")
    assert found.positions == (TokenPlace(sample=0, position=1),)
    assert found.command == f"swarm-node why {one.lease_id} --replay"
    found = rejected(world, key, answer(key, two, lease_digest="0" * 64), "lease_mismatch")
    assert (found.field, found.expected, found.observed) == ("lease_digest", two.digest, "0" * 64)
    assert found.tolerance == EXACT


def test_a_strangers_long_words_make_no_long_evidence(world: World) -> None:
    key = world.join(1)
    lease = world.lease(key)
    value: Any = canonical.decode(claim(lease).to_bytes())
    envelope = key.seal("rollout", canonical.encode(value | {"x" * limits.STRING_MAX_BYTES: 1}))
    found = rejected(world, key, envelope, "malformed_message")
    assert len(found.to_bytes()) < 2_000
