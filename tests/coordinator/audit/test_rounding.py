"""Rounding in 16 bits, measured by the auditor itself: when, on which prompts, and what comes of it."""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from coordinator.audit.reference_node import ReferenceNode
from coordinator.audit.rounding import GROUPS_MAX, RENEW_VERSIONS, Drawing, Rounding, drawings, honest_groups
from coordinator.audit.scorer import VersionScorer
from coordinator.rules import calibration
from coordinator.rules.calibration import POSITIONS_MIN, SHIPPED, Calibration, derive, read
from coordinator.rules.replay import Prefill, Scored, measure
from protocol.errors import AuditFailed
from protocol.work.auditing import AuditCase, Cases
from protocol.work.rollout import Completion
from tests.coordinator.audit.claims import honest
from tests.coordinator.audit.test_auditor import Played

ROUND, OTHER = "a" * 64, "b" * 64
BF16, ELSEWHERE = "torch/bf16/cpu", "vllm/bf16/cuda"
DRAWING = Drawing(np.array([19, 20, 13, 31], np.uint32), seed=5, count=6, length=40, temperature=0.9)


def measured_on(round_id: str) -> Calibration:
    groups = [honest(600, noise=1e-2, seed=seed) for seed in range(20)]
    return read(SHIPPED).with_class(derive(BF16, groups, round_id), made=read(SHIPPED).made, model="m")


def test_a_precision_is_measured_once_and_again_as_the_policy_moves() -> None:
    rounding, shipped = Rounding(ROUND), read(SHIPPED)
    assert rounding.due(3, [ELSEWHERE, "vllm/bf16/cpu"], shipped) == ["bf16"]
    made = measured_on(ROUND)
    assert rounding.due(4, [ELSEWHERE], made) == []
    assert rounding.due(2 + RENEW_VERSIONS, [ELSEWHERE], made) == []
    assert rounding.due(3 + RENEW_VERSIONS, [ELSEWHERE, "torch/fp16/cuda"], made) == ["bf16", "fp16"]
    assert rounding.due(4 + RENEW_VERSIONS, [ELSEWHERE, "torch/fp16/cuda"], made) == []


def test_numbers_of_another_round_do_not_count() -> None:
    assert Rounding(ROUND).due(1, [BF16], measured_on(OTHER)) == ["bf16"]


def test_a_restarted_auditor_goes_on_with_what_was_measured() -> None:
    rounding = Rounding(ROUND)
    assert rounding.due(9, [BF16], measured_on(ROUND)) == []
    assert rounding.due(9 + RENEW_VERSIONS, [BF16], measured_on(ROUND)) == ["bf16"]


@pytest.mark.parametrize("name", ["torch/fp32/cuda", "llama/q8_0/cpu", "", "nonsense", "a/b/c/d"])
def test_what_an_auditor_cannot_sample_in_is_never_due(name: str) -> None:
    assert Rounding(ROUND).due(1, [name], read(SHIPPED)) == []


def test_a_failed_measurement_is_not_tried_again_with_every_batch() -> None:
    rounding = Rounding(ROUND)
    assert rounding.due(1, [BF16], read(SHIPPED)) == ["bf16"]
    assert rounding.due(2, [BF16], read(SHIPPED)) == []


def test_prompts_take_turns_and_no_seed_is_a_leases() -> None:
    prompts = [(np.array([place], np.uint32), seed) for place, seed in enumerate((7, 10**6))]
    every = list(drawings(prompts, max_new_tokens=100, temperature=1.0))
    assert [int(one.prompt[0]) for one in every[:4]] == [0, 1, 0, 1]
    assert len({one.seed for one in every}) == len(every) == GROUPS_MAX
    assert {7, 10**6}.isdisjoint(one.seed for one in every)
    assert all(0 <= one.seed < 2**63 for one in every)


def test_it_ends_with_enough_positions() -> None:
    table = np.zeros(50)

    def draw(drawing: Drawing) -> list[Completion]:
        tokens = np.zeros(50, np.uint32)
        return [Completion(tokens, tokens.astype(np.float32), "length")] * drawing.count

    def score(claims: Sequence[Prefill]) -> list[list[Scored]]:
        scored = Scored(table, table, table.astype(np.int64))
        return [[scored] * len(claim.completions) for claim in claims]

    groups = list(honest_groups(drawings([(DRAWING.prompt, 1)], max_new_tokens=50, temperature=1.0), draw, score))
    assert POSITIONS_MIN <= sum(map(len, groups)) < POSITIONS_MIN + len(groups[-1]) + 1


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_reference_node_samples_as_an_honest_node_in_its_precision(policy: Path, precision: str) -> None:
    node = ReferenceNode(policy, precision)
    assert node.numerics == f"torch/{precision}/cpu"
    said = node.sample(DRAWING)
    [scored] = VersionScorer(policy).score(
        [Prefill(DRAWING.prompt, [one.tokens for one in said], DRAWING.seed, DRAWING.temperature)]
    )
    group = measure(said, scored)
    assert len(said) == DRAWING.count
    assert len({one.tokens.tobytes() for one in said}) > 1, "each sample has draws of its own"
    assert (group.claimed == group.dictated).mean() > 0.8
    assert 0 < np.abs(group.errors).max() < 0.1, "rounded, and nothing but rounded"


def test_the_same_drawing_is_the_same_group(policy: Path) -> None:
    node = ReferenceNode(policy, "bf16")
    first, again, other = (node.sample(one) for one in (DRAWING, DRAWING, replace(DRAWING, seed=6)))
    assert [one.tokens.tolist() for one in first] == [one.tokens.tolist() for one in again]
    assert [one.tokens.tolist() for one in first] != [one.tokens.tolist() for one in other]


def test_a_completion_ends_with_its_end_token(policy: Path) -> None:
    node = ReferenceNode(policy, "bf16")
    (end,) = node._end_tokens
    said = node.sample(replace(DRAWING, count=64, length=200))
    ended = [one.tokens for one in said if len(one.tokens) < 200]
    assert ended
    assert all(tokens[-1] == end and end not in tokens[:-1] for tokens in ended)


def test_a_folder_that_is_no_policy_is_refused(policy: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(policy, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(AuditFailed):
        ReferenceNode(broken, "bf16")


@pytest.fixture
def played(policy: Path, tmp_path: Path) -> Iterator[Played]:
    with closing(Played(tmp_path, policy, 4, 0)) as made:
        yield made


def taken(played: Played, policy: Path, version: int, named: str) -> Cases:
    case: AuditCase = played.case(version, policy, named=named)
    return Cases(version=version, cases=(case,), done=False)


def test_the_auditor_signs_what_it_measured_before_it_judges(played: Played, policy: Path) -> None:
    with closing(played.auditor()) as auditor:
        before = auditor._tolerances()
        assert not before.has_precision("bf16", played.round_id)
        made = auditor._measure_rounding(taken(played, policy, 3, ELSEWHERE), before)
    root = played.archive.metadata.root()
    assert calibration.load(played.config.round.directory, root) == made
    tolerance, is_measured = made.judging(BF16, played.round_id)
    assert is_measured
    assert tolerance.positions >= POSITIONS_MIN
    foreign, is_measured = made.judging(ELSEWHERE, played.round_id)
    assert not is_measured, "another engine's claims are paid by these numbers, never blamed"
    assert foreign.limits == tolerance.limits


def test_a_policy_that_cannot_be_sampled_leaves_claims_held(
    played: Played, policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cases = taken(played, policy, 3, BF16)
    with closing(played.auditor()) as auditor:
        before, place = auditor._tolerances(), auditor._policies.folder(3)
        assert place is not None
        (place / "config.json").write_text("{}")
        assert auditor._measure_rounding(cases, before) == before
    assert "rounding not measured precision=bf16" in caplog.text
