"""Replays of a later turn: judged after the whole context of its lease, and by what was drawn alone."""

from collections.abc import Callable
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
from protocol.work.rollout import RolloutClaim, Sample, pack_tokens, unpack_tokens
from swarm_node.engine.engine import Engine
from swarm_node.engine.llama.engine import LlamaEngine
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine

NODE = NodeKey(b"\1" * 32)
ROUND, TURN, LONGEST, SAMPLES = "0" * 64, 5, 40, 3
SAMPLER = Sampler(temperature=1.0, max_new_tokens=LONGEST)
READ = pack_tokens([40, 41, 42])
"""The environment's answer to the first turn."""
ENGINES: dict[str, Callable[[], Engine]] = {"torch": TorchEngine, "llama": lambda: LlamaEngine(dtype="float32")}

FIRST = Lease(
    lease_id="0" * 32, version=1, seed=7, samples=SAMPLES, prompt=pack_tokens([20, 21, 22]), price_micros_per_mtok=1,
    expires_ms=1, turn_tokens_max=TURN,
)  # fmt: skip


def turn_after(lease: Lease, samples: tuple[Sample, ...], read: bytes = READ) -> Lease:
    """The next turn's lease; the last sample's episode is over."""
    prefixes = tuple(
        Prefix(tokens=sample.tokens + read, finish="") if number < SAMPLES - 1 else Prefix(tokens=b"", finish="stop")
        for number, sample in enumerate(samples)
    )
    return lease.model_copy(update={"lease_id": "1" * 32, "prefixes": prefixes})


@pytest.fixture(scope="module", params=ENGINES)
def played(policy: Path, request: pytest.FixtureRequest) -> tuple[Lease, tuple[Sample, ...]]:
    """A second turn as an honest node takes it, with its lease."""
    engine = ENGINES[request.param]()
    engine.load(policy, 1)

    def sampled(lease: Lease) -> tuple[Sample, ...]:
        done = list[GroupDone]()
        engine.generate([SampleRequest.from_lease(lease, SAMPLER, report_every_s=0.0)], done.append)
        return done[0].samples

    second = turn_after(FIRST, sampled(FIRST))
    return second, sampled(second)


def case(policy: Path, lease: Lease, samples: tuple[Sample, ...], signed: Lease | None = None) -> Case:
    """The case of a claim; `signed` is the lease whose digest the node has signed, if it is another."""
    claim = RolloutClaim(
        round_id=ROUND, lease_id=lease.lease_id, lease_digest=(signed or lease).digest, samples=samples
    )
    rollout = NODE.seal("rollout", claim.to_bytes())
    file = CaseFile(round_id=ROUND, lease=lease.to_bytes(), rollout=rollout, fragments=(), sampler=SAMPLER)
    return opened(file, policy, [])


def judged(policy: Path, claimed: Case) -> AuditReport:
    scorer = VersionScorer(policy)
    (report,) = audit(
        [claimed], lambda _, claims: scorer.score(claims), calibration.read(calibration.SHIPPED), "torch/fp32/cpu"
    )
    return report


def test_an_honest_turn_passes_and_only_its_own_tokens_are_measured(
    policy: Path, played: tuple[Lease, tuple[Sample, ...]]
) -> None:
    lease, samples = played
    report = judged(policy, case(policy, lease, samples))
    assert report.outcome == AuditOutcome.PASS
    assert report.summary.positions == sum(len(sample.tokens) // 4 for sample in samples)
    assert report.summary.error_max < 1e-4


def test_a_token_that_the_seed_did_not_dictate_fails(policy: Path, played: tuple[Lease, tuple[Sample, ...]]) -> None:
    lease, samples = played
    tokens = unpack_tokens(samples[0].tokens).copy()
    tokens[0] = 60 if tokens[0] != 60 else 61
    edited = samples[0].model_copy(update={"tokens": pack_tokens(tokens)})
    report = judged(policy, case(policy, lease, (edited, *samples[1:])))
    assert report.outcome == AuditOutcome.HARD


def test_a_turn_that_was_taken_after_an_edited_observation_fails(
    policy: Path, played: tuple[Lease, tuple[Sample, ...]]
) -> None:
    """The node samples after other words than the environment's: its tokens are not those of its lease's context."""
    lease, _ = played
    engine, done = TorchEngine(), list[GroupDone]()
    engine.load(policy, 1)
    easier = lease.model_copy(
        update={
            "prefixes": tuple(
                prefix if prefix.finish else Prefix(tokens=prefix.tokens[:-4] + pack_tokens([99]), finish="")
                for prefix in lease.prefixes
            )
        }
    )
    engine.generate([SampleRequest.from_lease(easier, SAMPLER, report_every_s=0.0)], done.append)
    assert judged(policy, case(policy, lease, done[0].samples)).outcome == AuditOutcome.HARD
    report = judged(policy, case(policy, lease, done[0].samples, signed=easier))
    assert [finding.rule for finding in report.findings] == ["form"]
    assert "lease_mismatch" in report.findings[0].observed
