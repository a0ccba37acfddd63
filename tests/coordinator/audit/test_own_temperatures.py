"""Audits of leases with a temperature of their own: what the shipped engine draws, judged beside other leases."""

from pathlib import Path

import pytest

from coordinator.audit.case import Case, opened
from coordinator.audit.check import audit
from coordinator.audit.scorer import VersionScorer
from coordinator.rules import calibration
from coordinator.rules.verdict import AuditOutcome, AuditReport
from protocol.policy.manifest import Sampler
from protocol.wire.signing import NodeKey
from protocol.work.auditing import CaseFile
from protocol.work.lease import Lease, Prefix
from protocol.work.rollout import RolloutClaim, Sample, pack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine
from tests.coordinator.audit.claims import on_round

ROUND = "a" * 64
NODE = NodeKey(b"\1" * 32)
NEW_TOKENS = 24
SAMPLES = 4
SAMPLER = Sampler(temperature=0.9, max_new_tokens=NEW_TOKENS)
OWN = (None, 0.0, 0.01, 0.5, 2.0)
CLASSES = {"float32": "torch/fp32/cpu", "bfloat16": "torch/bf16/cpu"}


def lease(own: float | None, judged_as: str, prefixes: tuple[Prefix, ...] = ()) -> Lease:
    return Lease(
        lease_id="1" * 32, version=1, seed=7, samples=SAMPLES, prompt=pack_tokens([19, 20, 31, 33, 40]),
        price_micros_per_mtok=1, expires_ms=1, judged_as=judged_as, prefixes=prefixes, temperature=own,
    )  # fmt: skip


def sampled(policy: Path, dtype: str, leases: list[Lease]) -> list[tuple[Sample, ...]]:
    """The samples of a node that gets all of these leases at once."""
    engine, done = TorchEngine(dtype=dtype), list[GroupDone]()
    engine.load(policy, 1)
    wanted = [SampleRequest.from_lease(one, SAMPLER, report_every_s=0.0) for one in leases]
    named = [one.model_copy(update={"request_id": str(number)}) for number, one in enumerate(wanted)]
    engine.generate(named, done.append)
    return [group.samples for group in sorted(done, key=lambda group: int(group.request_id))]


def case(policy: Path, asked: Lease, samples: tuple[Sample, ...]) -> Case:
    claim = RolloutClaim(round_id=ROUND, lease_id=asked.lease_id, lease_digest=asked.digest, samples=samples)
    rollout = NODE.seal("rollout", claim.to_bytes())
    file = CaseFile(round_id=ROUND, lease=asked.to_bytes(), rollout=rollout, fragments=(), sampler=SAMPLER)
    return opened(file, policy, [])


def judged(policy: Path, cases: list[Case]) -> list[AuditReport]:
    scorer, allowed = VersionScorer(policy), on_round(calibration.read(calibration.SHIPPED), ROUND)
    return audit(cases, lambda _, claims: scorer.score(claims), allowed, "torch/fp32/cpu")


@pytest.mark.parametrize("dtype", CLASSES)
def test_an_honest_node_passes_at_every_temperature(policy: Path, dtype: str) -> None:
    leases = [lease(own, CLASSES[dtype]) for own in OWN]
    claims = zip(leases, sampled(policy, dtype, leases), strict=True)
    reports = judged(policy, [case(policy, asked, samples) for asked, samples in claims])
    assert [report.outcome for report in reports] == [AuditOutcome.PASS] * len(OWN), reports
    assert all(report.summary.positions == SAMPLES * NEW_TOKENS for report in reports[1:2])


@pytest.mark.parametrize("dtype", CLASSES)
@pytest.mark.parametrize("own", OWN)
def test_a_node_that_draws_at_another_temperature_than_asked_fails_hard(
    policy: Path, dtype: str, own: float | None
) -> None:
    asked = lease(own, CLASSES[dtype])
    others = [lease(other, CLASSES[dtype]) for other in OWN if other != own and {own, other} != {0.0, 0.01}]
    reports = judged(policy, [case(policy, asked, samples) for samples in sampled(policy, dtype, others)])
    assert [report.outcome for report in reports] == [AuditOutcome.HARD] * len(others), reports
    assert all({finding.rule for finding in report.findings} & {"token", "tokens"} for report in reports)


@pytest.mark.parametrize("own", [0.0, 0.5])
def test_whoever_goes_on_with_a_lease_is_judged_at_its_temperature(policy: Path, own: float) -> None:
    first = lease(own, CLASSES["float32"])
    (whole,) = sampled(policy, "float32", [first])
    begun = tuple(Prefix(tokens=one.tokens[:20], finish="") for one in whole)
    after = lease(own, CLASSES["float32"], begun)
    honest, other = sampled(policy, "float32", [after, lease(None, CLASSES["float32"], begun)])
    assert [report.outcome for report in judged(policy, [case(policy, after, one) for one in (honest, other)])] == [
        AuditOutcome.PASS,
        AuditOutcome.HARD,
    ]
    assert [one.tokens[20:] for one in whole] == [one.tokens for one in honest]
