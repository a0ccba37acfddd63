"""Audits of what CUDA samples: honest groups pass, by numbers that an auditor measures, and cheats fail."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from coordinator.audit.reference_node import ReferenceNode
from coordinator.audit.rounding import drawings, honest_groups
from coordinator.audit.scorer import VersionScorer
from coordinator.rules.calibration import Tolerance, derive
from coordinator.rules.replay import Prefill, ReplayMeasurement, measure
from coordinator.rules.verdict import AuditOutcome, judge
from protocol.work.rollout import Completion
from swarm_node.engine.torch.engine import TorchEngine
from tests.gpu.sampling import NEW_TOKENS, Leased, leased, sampled

ROUND = "a" * 64
GROUPS = 12


@pytest.fixture(scope="module")
def scorer(qwen3: Path) -> VersionScorer:
    """Replay on the CPU in float32, as auditors do by default."""
    return VersionScorer(qwen3)


@pytest.fixture(scope="module")
def tolerance(qwen3: Path, scorer: VersionScorer, device: str) -> Tolerance:
    node = ReferenceNode(qwen3, "bf16", device=device)
    asked = [(np.array(lease.prompt, np.uint32), lease.seed) for lease in leased(6, first_seed=500)]
    every = drawings(asked, max_new_tokens=NEW_TOKENS, temperature=1.0)
    return derive(node.numerics, list(honest_groups(every, node.sample, scorer.score)), ROUND)


def replayed(scorer: VersionScorer, lease: Leased, said: Sequence[Completion]) -> ReplayMeasurement:
    claim = Prefill(np.array(lease.prompt, np.uint32), [one.tokens for one in said], lease.seed, 1.0)
    return measure(said, scorer.score([claim])[0])


def outcomes(
    scorer: VersionScorer, tolerance: Tolerance, leases: list[Leased], said: list[list[Completion]]
) -> list[AuditOutcome]:
    return [
        judge(replayed(scorer, lease, group), tolerance, 1).outcome for lease, group in zip(leases, said, strict=True)
    ]


def test_honest_groups_in_bf16_pass(qwen3: Path, scorer: VersionScorer, tolerance: Tolerance, device: str) -> None:
    engine, leases = TorchEngine(device=device, dtype="bfloat16"), leased(GROUPS)
    engine.load(qwen3, 1)
    assert outcomes(scorer, tolerance, leases, sampled(engine, leases)) == [AuditOutcome.PASS] * GROUPS


def test_answers_to_other_seeds_fail(qwen3: Path, scorer: VersionScorer, tolerance: Tolerance, device: str) -> None:
    engine, leases = TorchEngine(device=device, dtype="bfloat16"), leased(4)
    engine.load(qwen3, 1)
    others = [Leased(lease.prompt, lease.seed + 1000) for lease in leases]
    assert AuditOutcome.PASS not in outcomes(scorer, tolerance, leases, sampled(engine, others))


def test_a_replay_on_the_device_scores_as_one_on_the_cpu(qwen3: Path, scorer: VersionScorer, device: str) -> None:
    leases, engine = leased(3), TorchEngine(device="cpu", dtype="float32")
    engine.load(qwen3, 1)
    said, there = sampled(engine, leases), VersionScorer(qwen3, device=device)
    for lease, group in zip(leases, said, strict=True):
        ours, theirs = (replayed(one, lease, group) for one in (there, scorer))
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-3)
