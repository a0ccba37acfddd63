"""Real versions of a policy, and who sampled from which of them: the neighbour that an auditor compares with."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.audit.scorer import VersionScorer
from coordinator.rules import calibration
from coordinator.rules.replay import Prefill, ReplayMeasurement, measure
from coordinator.rules.verdict import AuditOutcome, AuditReport, judge
from protocol.work.rollout import Completion, pack_tokens, unpack_logprobs, unpack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine

PROMPT = [19, 20, 31, 33, 40]
SEED = 7
WEIGHTS = "model.safetensors"


def with_last_bits_of(folder: Path, target: Path, count: int) -> Path:
    """Write the same policy, but for the last bits of so many weights."""
    shutil.copytree(folder, target)
    tensors, chance = load_file(target / WEIGHTS), np.random.Generator(np.random.Philox(count))
    names = sorted(name for name, tensor in tensors.items() if tensor.dim() == 2)
    for _ in range(count):
        flat = tensors[names[chance.integers(len(names))]].view(-1)
        place = int(chance.integers(len(flat)))
        flat[place] = torch.nextafter(flat[place], torch.tensor(9.0))
    save_file(tensors, target / WEIGHTS, {"format": "pt"})
    return target


def shifted(folder: Path, target: Path, by: float) -> Path:
    """Write the same policy after a step of this size in every weight."""
    shutil.copytree(folder, target)
    tensors, random = load_file(target / WEIGHTS), torch.Generator().manual_seed(1)
    moved = {name: one + by * torch.randn(one.shape, generator=random).sign() for name, one in tensors.items()}
    save_file(moved, target / WEIGHTS, {"format": "pt"})
    return target


def sampled(folder: Path) -> list[Completion]:
    """A group as the shipped engine draws it."""
    engine, done = TorchEngine(), list[GroupDone]()
    engine.load(folder, 1)
    request = SampleRequest(
        request_id="0",
        version=1,
        prompt=pack_tokens(PROMPT),
        seed=SEED,
        samples=16,
        max_new_tokens=64,
        temperature=1.0,
    )
    engine.generate([request], done.append)
    return [Completion(unpack_tokens(one.tokens), unpack_logprobs(one.logprobs), one.finish) for one in done[0].samples]


def replayed(folder: Path, said: list[Completion]) -> ReplayMeasurement:
    prefill = Prefill(np.array(PROMPT, np.uint32), [one.tokens for one in said], SEED, 1.0)
    return measure(said, VersionScorer(folder).score([prefill])[0])


def judged(said: list[Completion], claimed: Path, other: Path, tolerance: str) -> AuditReport:
    allowed = calibration.read(calibration.SHIPPED).tolerances_of(tolerance)
    return judge(replayed(claimed, said), allowed, 1, {1: replayed(other, said)})


@pytest.mark.parametrize("count", [1, 10, 100])
def test_an_honest_node_is_not_blamed_for_a_version_that_hardly_differs(
    policy: Path, tmp_path: Path, count: int
) -> None:
    before = with_last_bits_of(policy, tmp_path / "before", count)
    assert judged(sampled(policy), policy, before, "torch/fp32/cpu").outcome is not AuditOutcome.HARD


def test_who_claims_what_the_auditors_own_program_says_of_an_older_version_is_found(
    policy: Path, tmp_path: Path
) -> None:
    before = shifted(policy, tmp_path / "before", 1e-5)
    said = sampled(before)
    prefill = Prefill(np.array(PROMPT, np.uint32), [one.tokens for one in said], SEED, 1.0)
    (scored,) = VersionScorer(before).score([prefill])
    forged = [
        Completion(one.tokens, found.logprobs.astype(np.float32), one.finish)
        for one, found in zip(said, scored, strict=True)
    ]
    for claim in (said, forged):
        report = judged(claim, policy, before, "torch/bf16/cpu")
        assert [(finding.rule, finding.outcome) for finding in report.findings] == [("version", AuditOutcome.HARD)]
