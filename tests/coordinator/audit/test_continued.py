"""Replays of groups that two nodes worked on: each is judged by its own tokens, with the other's as given.

One policy, one engine: a group is sampled whole, and cut into what one node told of and what the other answered.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.audit.case import Case, opened
from coordinator.audit.check import audit, replay
from coordinator.audit.scorer import VersionScorer
from coordinator.rules import calibration
from coordinator.rules.replay import ReplayMeasurement
from coordinator.rules.verdict import AuditOutcome, AuditReport
from protocol.errors import AuditFailed, SwarmError
from protocol.policy.chunks import digest
from protocol.policy.manifest import Sampler
from protocol.wire.signing import NodeKey, open_envelope
from protocol.work.auditing import CaseFile
from protocol.work.fragment import Fragment, FragmentPart
from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import RolloutClaim, Sample, pack_tokens, unpack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine

FIRST, SECOND = NodeKey(b"\1" * 32), NodeKey(b"\2" * 32)
ROUND, SEED, NEW_TOKENS = "0" * 64, 7, 12
PROMPT = pack_tokens([19, 20, 13, 31])
CUTS = (5, 0, NEW_TOKENS)
"""The number of tokens of each sample that the first node made: some, none, all."""


@pytest.fixture(scope="module")
def whole(policy: Path) -> tuple[Sample, ...]:
    """The group as one honest node would have answered it, no sample with an early end."""
    engine, done = TorchEngine(), list[GroupDone]()
    engine.load(policy, 1)
    wanted = SampleRequest(
        request_id="a", version=1, prompt=PROMPT, seed=SEED, samples=len(CUTS), max_new_tokens=NEW_TOKENS,
        temperature=1.0,
    )  # fmt: skip
    engine.generate([wanted], done.append)
    assert [len(sample.tokens) // 4 for sample in done[0].samples] == [NEW_TOKENS] * len(CUTS)
    return done[0].samples


def lease(prefixes: tuple[Prefix, ...] = ()) -> Lease:
    return Lease(
        lease_id=("1" if prefixes else "0") * 32, version=1, seed=SEED, samples=len(CUTS), prompt=PROMPT,
        price_micros_per_mtok=1, expires_ms=1, prefixes=prefixes,
    )  # fmt: skip


def part(policy: Path, whole: tuple[Sample, ...], *, pieces: int = 1, **change: Any) -> Case:
    """The first node's claim, told in so many pieces."""
    told, envelopes, starts = list[Fragment](), list[bytes](), [0] * len(CUTS)
    for piece in range(1, pieces + 1):
        parts = []
        for number, (sample, cut) in enumerate(zip(whole, CUTS, strict=True)):
            start, end = starts[number], cut * piece // pieces
            if end > start:
                finish = sample.finish if end == NEW_TOKENS else ""
                grown = {"tokens": sample.tokens[4 * start : 4 * end], "logprobs": sample.logprobs[4 * start : 4 * end]}
                parts.append(FragmentPart(sample=number, start=start, finish=finish, **grown))
                starts[number] = end
        fields: dict[str, Any] = {
            "round_id": ROUND,
            "lease_id": "0" * 32,
            "lease_digest": lease().digest,
            "parts": tuple(parts),
        }
        told.append(Fragment(**(fields | {"previous": _name(envelopes)} | change)))
        envelopes.append(FIRST.seal("fragment", told[-1].to_bytes()))
    return opened(file(lease(), fragments=tuple(envelopes)), policy, [])


def rest(policy: Path, whole: tuple[Sample, ...], given: tuple[Sample, ...]) -> Case:
    """The second node's claim, when it was given the beginnings of these samples."""
    prefixes = tuple(
        Prefix(tokens=sample.tokens[: 4 * cut], finish=sample.finish if cut == NEW_TOKENS else "")
        for sample, cut in zip(given, CUTS, strict=True)
    )
    after = lease(prefixes)
    samples = tuple(
        Sample(tokens=sample.tokens[4 * cut :], logprobs=sample.logprobs[4 * cut :], finish=sample.finish)
        for sample, cut in zip(whole, CUTS, strict=True)
    )
    claim = RolloutClaim(round_id=ROUND, lease_id=after.lease_id, lease_digest=after.digest, samples=samples)
    return opened(file(after, rollout=SECOND.seal("rollout", claim.to_bytes())), policy, [])


def file(of: Lease, *, rollout: bytes = b"", fragments: tuple[bytes, ...] = ()) -> CaseFile:
    sampler = Sampler(temperature=1.0, max_new_tokens=NEW_TOKENS)
    return CaseFile(round_id=ROUND, lease=of.to_bytes(), rollout=rollout, fragments=fragments, sampler=sampler)


def _name(envelopes: list[bytes]) -> str:
    return digest(open_envelope("fragment", envelopes[-1]).payload) if envelopes else ""


def wrong(samples: tuple[Sample, ...], number: int, position: int) -> tuple[Sample, ...]:
    """Return the claim with one other token, which ends nothing."""
    tokens = unpack_tokens(samples[number].tokens).copy()
    tokens[position] = 19 if tokens[position] != 19 else 20
    return tuple(
        sample.model_copy(update={"tokens": tokens.tobytes()}) if at == number else sample
        for at, sample in enumerate(samples)
    )


def judged(policy: Path, case: Case) -> AuditReport:
    scorer = VersionScorer(policy)
    (report,) = audit(
        [case], lambda _, claims: scorer.score(claims), calibration.read(calibration.SHIPPED), "torch/fp32/cpu"
    )
    return report


def measured(policy: Path, case: Case) -> ReplayMeasurement:
    scorer = VersionScorer(policy)
    (found,) = replay([case], lambda _, claims: scorer.score(claims))
    assert not isinstance(found, SwarmError), found
    return found[1]


@pytest.mark.parametrize("pieces", [1, 2])
def test_an_honest_part_and_an_honest_rest_pass_with_their_own_tokens_only(
    policy: Path, whole: tuple[Sample, ...], pieces: int
) -> None:
    first, second = part(policy, whole, pieces=pieces), rest(policy, whole, whole)
    assert (first.node, second.node) == (FIRST.node_id, SECOND.node_id)
    assert [judged(policy, case).outcome for case in (first, second)] == [AuditOutcome.PASS] * 2
    places = [measured(policy, case) for case in (first, second)]
    assert [len(place) for place in places] == [5 + 12, 7 + 12]
    assert all((place.claimed == place.dictated).all() for place in places)
    assert places[0].sample.tolist() == [0] * 5 + [2] * 12
    assert places[1].sample.tolist() == [0] * 7 + [1] * 12
    assert places[1].position.tolist() == [*range(5, 12), *range(12)]
    assert np.abs(places[1].errors).max() < 1e-3


def test_each_claim_is_judged_by_the_class_that_its_lease_names(policy: Path, whole: tuple[Sample, ...]) -> None:
    case = part(policy, whole)
    bound = replace(case, lease=case.lease.model_copy(update={"judged_as": "torch/bf16/cpu"}))
    assert [judged(policy, one).tolerance for one in (case, bound)] == ["torch/fp32/cpu", "torch/bf16/cpu"]
    unknown = replace(case, lease=case.lease.model_copy(update={"judged_as": "abacus/wood/hand"}))
    assert judged(policy, unknown).tolerance == "abacus/wood/hand"


def test_one_wrong_token_of_the_rest_is_found_at_its_place(policy: Path, whole: tuple[Sample, ...]) -> None:
    report = judged(policy, rest(policy, wrong(whole, 0, 8), whole))
    assert report.outcome is AuditOutcome.HARD
    worst = report.findings[0].positions[0]
    assert (worst.sample, worst.position) == (0, 8)


def test_one_wrong_token_of_a_part_is_found_at_its_place(policy: Path, whole: tuple[Sample, ...]) -> None:
    report = judged(policy, part(policy, wrong(whole, 2, 3)))
    assert report.outcome is AuditOutcome.HARD
    worst = report.findings[0].positions[0]
    assert (worst.sample, worst.position) == (2, 3)


def test_whoever_went_on_from_a_wrong_token_is_not_blamed_for_it(policy: Path, whole: tuple[Sample, ...]) -> None:
    """The engine goes on from garbage as from anything else."""
    garbage = wrong(whole, 0, 2)
    prefixes = rest(policy, whole, garbage).lease.prefixes
    engine, done = TorchEngine(), list[GroupDone]()
    engine.load(policy, 1)
    wanted = SampleRequest(
        request_id="a", version=1, prompt=PROMPT, seed=SEED, samples=len(CUTS), max_new_tokens=NEW_TOKENS,
        temperature=1.0, prefixes=prefixes,
    )  # fmt: skip
    engine.generate([wanted], done.append)
    after = lease(prefixes)
    claim = RolloutClaim(round_id=ROUND, lease_id=after.lease_id, lease_digest=after.digest, samples=done[0].samples)
    second = opened(file(after, rollout=SECOND.seal("rollout", claim.to_bytes())), policy, [])
    assert judged(policy, second).outcome is AuditOutcome.PASS
    assert judged(policy, part(policy, garbage)).outcome is AuditOutcome.HARD


def test_a_part_that_its_lease_does_not_allow_needs_no_model(policy: Path, whole: tuple[Sample, ...]) -> None:
    changes: list[dict[str, Any]] = [{"lease_digest": "2" * 64}, {"previous": "f" * 64}, {"lease_id": "2" * 32}]
    for change in changes:
        report = judged(policy, part(policy, whole, **change))
        assert [finding.rule for finding in report.findings] == ["form"]


def test_a_claim_without_a_token_of_its_own_is_malformed(policy: Path, whole: tuple[Sample, ...]) -> None:
    done = tuple(Prefix(tokens=sample.tokens, finish=sample.finish) for sample in whole)
    nothing = tuple(Sample(tokens=b"", logprobs=b"", finish=sample.finish) for sample in whole)
    case = replace(rest(policy, whole, whole), lease=lease(done))
    assert isinstance(case.claim, RolloutClaim)
    case = replace(case, claim=case.claim.model_copy(update={"samples": nothing}))
    assert [finding.rule for finding in judged(policy, case).findings] == ["form"]


def test_fragments_of_two_nodes_are_no_case(policy: Path, whole: tuple[Sample, ...]) -> None:
    told = part(policy, whole, pieces=2).claim
    assert isinstance(told, tuple)
    sealed = tuple(key.seal("fragment", payload) for key, payload in zip((FIRST, SECOND), told, strict=True))
    with pytest.raises(AuditFailed, match="several nodes"):
        opened(file(lease(), fragments=sealed), policy, [])
