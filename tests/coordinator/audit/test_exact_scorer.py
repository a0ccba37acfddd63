"""Work of exact nodes is replayed to the bit: honest work always passes, and one other token never does."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.audit import exact_scorer as module
from coordinator.audit.exact_scorer import ExactScorer
from coordinator.rules.calibration import SHIPPED, read
from coordinator.rules.replay import Prefill, ReplayMeasurement, measure
from coordinator.rules.verdict import AuditOutcome, AuditReport, judge, judge_exactly
from protocol.errors import AuditFailed
from protocol.work.rollout import Completion, pack_tokens, unpack_tokens
from swarm_exact.model import KeysValues
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine
from tests.adapted_policy import make_adapted
from tests.tiny_policy import make_tiny_policy

PROMPTS = ([19], [19, 20, 13, 21, 22, 31], [7 + number % 200 for number in range(70)])
SAMPLES, LENGTH = 8, 24
FLOAT = read(SHIPPED).tolerances_of("torch/fp32/cpu")
Said = list[tuple[Completion, ...]]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


def requests(own: float | None = None) -> list[SampleRequest]:
    return [
        SampleRequest(
            request_id=str(seed), version=1, prompt=pack_tokens(prompt), seed=seed, samples=SAMPLES,
            max_new_tokens=LENGTH, temperature=0.9, own_temperature=own,
        )
        for seed, prompt in enumerate(PROMPTS)
    ]  # fmt: skip  # one field after the other


def said_by(folder: Path, asked: Sequence[SampleRequest], *, dtype: str = "exact") -> Said:
    engine, done = TorchEngine(device="cpu", dtype=dtype, slots=11), list[GroupDone]()
    engine.load(folder, 1)
    engine.generate(asked, done.append)
    return [
        tuple(Completion(unpack_tokens(row.tokens), np.frombuffer(row.logprobs, "<f4"), row.finish) for row in rows)
        for rows in (group.samples for group in sorted(done, key=lambda group: int(group.request_id)))
    ]


def replayed(scorer: ExactScorer, said: Said, own: float | None = None) -> list[ReplayMeasurement]:
    claims = [
        Prefill(np.array(prompt, np.uint32), [row.tokens for row in rows], seed, 0.9, own)
        for seed, (prompt, rows) in enumerate(zip(PROMPTS, said, strict=True))
    ]
    return [measure(rows, scored) for rows, scored in zip(said, scorer.score(claims), strict=True)]


def verdicts(scorer: ExactScorer, said: Said, other: ExactScorer | None = None) -> list[AuditReport]:
    before = [{1: rows} for rows in replayed(other, said)] if other else [{} for _ in said]
    return [
        judge_exactly(rows, FLOAT, 1, neighbours)
        for rows, neighbours in zip(replayed(scorer, said), before, strict=True)
    ]


def outcomes(reports: Sequence[AuditReport]) -> set[AuditOutcome]:
    return {report.outcome for report in reports}


@pytest.fixture(scope="module")
def honest(policy: Path) -> Said:
    return said_by(policy, requests())


@pytest.fixture(scope="module")
def scorer(policy: Path) -> ExactScorer:
    return ExactScorer(policy)


@pytest.mark.parametrize("own", [None, 0.0, 0.5, 1.7])
def test_honest_work_has_no_other_bit(policy: Path, scorer: ExactScorer, own: float | None) -> None:
    for measured in replayed(scorer, said_by(policy, requests(own)), own):
        assert not measured.errors.any()
        assert measured.claimed.tolist() == measured.dictated.tolist()
        assert not measured.margins.any()


@pytest.mark.parametrize(("body", "head"), [(7, 320 * 5), (30, 320 * 64), (4096, 2**23)])
def test_pieces_and_slices_change_no_bit(
    scorer: ExactScorer, honest: Said, monkeypatch: pytest.MonkeyPatch, body: int, head: int
) -> None:
    monkeypatch.setattr(module, "BODY_TOKENS_MAX", body)  # a bound of memory that this policy never reaches
    monkeypatch.setattr(module, "HEAD_LOGITS_MAX", head)  # a bound of memory that this policy never reaches
    assert outcomes(verdicts(scorer, honest)) == {AuditOutcome.PASS}
    assert not any(measured.errors.any() for measured in replayed(scorer, honest))


@pytest.mark.parametrize("threads", [1, 2])
def test_the_auditors_threads_change_no_bit(policy: Path, honest: Said, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        assert not any(rows.errors.any() for rows in replayed(ExactScorer(policy, threads=threads), honest))
    finally:
        torch.set_num_threads(before)


def test_an_adapted_policy_is_replayed_with_the_nodes_bits(tmp_path: Path) -> None:
    adapted = make_adapted(make_tiny_policy(tmp_path / "base"), tmp_path / "adapted", seed=3)
    for measured in replayed(ExactScorer(adapted), said_by(adapted, requests())):
        assert not measured.errors.any()


def test_one_other_token_is_a_fault(scorer: ExactScorer, honest: Said) -> None:
    first = max(honest[0], key=lambda row: len(row.tokens))
    tokens = first.tokens.copy()
    tokens[3] = (tokens[3] + 1) % 300 + 3
    edited = replayed(scorer, [_again(honest[0], first, replace(first, tokens=tokens)), *honest[1:]])
    # Even with the log-probabilities that a replay of these tokens gives.
    report = judge_exactly(replace(edited[0], claimed_logprobs=edited[0].logprobs), FLOAT, 1)
    assert report.outcome is AuditOutcome.HARD
    (finding,) = [finding for finding in report.findings if finding.rule == "exact"]
    assert finding.positions[0].position == 3


def test_one_other_bit_of_a_log_probability_is_a_question(scorer: ExactScorer, honest: Said) -> None:
    first, *rest = honest[0]
    logprobs = first.logprobs.copy()
    logprobs[0] = np.nextafter(logprobs[0], np.float32(-9))
    reports = verdicts(scorer, [(replace(first, logprobs=logprobs), *rest), *honest[1:]])
    assert [report.outcome for report in reports] == [AuditOutcome.SOFT, AuditOutcome.PASS, AuditOutcome.PASS]


def test_log_probabilities_beyond_the_tolerance_of_float32_are_a_fault(scorer: ExactScorer, honest: Said) -> None:
    moved = [tuple(replace(row, logprobs=row.logprobs - np.float32(0.1)) for row in rows) for rows in honest]
    assert outcomes(verdicts(scorer, moved)) == {AuditOutcome.HARD}


def test_8_bit_weights_with_faked_log_probabilities_are_a_fault(
    policy: Path, scorer: ExactScorer, tmp_path: Path
) -> None:
    rounded = changed(policy, tmp_path / "rounded", quantised)
    said = said_by(rounded, requests())
    prefilled = [replace(rows, claimed_logprobs=rows.logprobs) for rows in replayed(scorer, said)]
    assert outcomes([judge_exactly(rows, FLOAT, 1) for rows in prefilled]) == {AuditOutcome.HARD}
    bf16 = read(SHIPPED).tolerances_of("torch/bf16/cpu")  # where the same work is paid
    assert outcomes([judge(rows, bf16, 1) for rows in prefilled]) == {AuditOutcome.PASS}


def test_the_version_before_is_a_fault_by_its_tokens_or_by_its_log_probabilities(
    policy: Path, scorer: ExactScorer, tmp_path: Path
) -> None:
    before = changed(policy, tmp_path / "before", lambda weight: weight + 1e-6 * weight.sign())
    reports = verdicts(scorer, said_by(before, requests()), ExactScorer(before))
    assert outcomes(reports) == {AuditOutcome.HARD}
    assert any("all log-probabilities are those of version 1" in each.observed for each in reports[0].findings)


def test_a_few_repeated_log_probabilities_are_a_question(policy: Path, scorer: ExactScorer, tmp_path: Path) -> None:
    """A likely token's log-probability has so few values that two versions can have the same one."""
    before = changed(policy, tmp_path / "before", lambda weight: weight + 1e-6 * weight.sign())
    said, other = said_by(before, requests()), ExactScorer(before)
    short = [tuple(replace(row, tokens=row.tokens[:2], logprobs=row.logprobs[:2]) for row in rows) for rows in said]
    reports = verdicts(scorer, short, other)
    found = [[each for each in report.findings if "those of version 1" in each.observed] for report in reports]
    assert any(found)
    assert {each.outcome for every in found for each in every} == {AuditOutcome.SOFT}


@pytest.mark.parametrize("chosen", ["best group of 4 seeds", "best samples of 4 groups", "best sample in every place"])
def test_the_best_of_several_groups_is_a_fault(policy: Path, scorer: ExactScorer, honest: Said, chosen: str) -> None:
    """Every token of this policy is plausible; its seed and its place in the group are bound, too."""
    assert max(float(np.exp(row.logprobs).max()) for rows in honest for row in rows) < 0.9
    tries = [honest] + [
        said_by(policy, [request.model_copy(update={"seed": request.seed + 99 * number}) for request in requests()])
        for number in (1, 2, 3)
    ]

    def liked(row: Completion) -> float:
        return float((row.tokens % 7 == 0).mean())

    said = Said()
    for groups in zip(*tries, strict=True):
        best = sorted((row for rows in groups for row in rows), key=liked, reverse=True)
        said.append(
            max(groups[1:], key=lambda rows: sum(map(liked, rows)))
            if chosen.startswith("best group")
            else tuple(best[:SAMPLES])
            if chosen.startswith("best samples")
            else (best[0],) * SAMPLES
        )
    # Even with the log-probabilities that a replay of these tokens gives.
    faked = [judge_exactly(replace(rows, claimed_logprobs=rows.logprobs), FLOAT, 1) for rows in replayed(scorer, said)]
    assert outcomes(faked) == {AuditOutcome.HARD}
    assert all("exact" in {finding.rule for finding in report.findings} for report in faked)


def test_samples_of_a_long_prompt_are_copied_a_few_at_a_time(
    scorer: ExactScorer, honest: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    most, sizes = 2 * (len(PROMPTS[-1]) + LENGTH), list[tuple[int, int]]()
    monkeypatch.setattr(module, "CACHED_TOKENS_MAX", most)  # a bound of memory that this policy never reaches
    grow = KeysValues.grow

    def counted(cache: KeysValues, rows: int, positions: int, kept_rows: int) -> None:
        sizes.append((rows, positions))
        grow(cache, rows, positions, kept_rows)

    monkeypatch.setattr(KeysValues, "grow", counted)  # the real one, whose sizes are recorded
    assert not any(measured.errors.any() for measured in replayed(scorer, honest))
    assert max(rows * positions for rows, positions in sizes) <= most
    assert {rows for rows, positions in sizes if positions > len(PROMPTS[-1])} == {1, 2}


def test_a_temperature_of_0_98_is_a_fault(policy: Path, scorer: ExactScorer) -> None:
    warm = [request.model_copy(update={"own_temperature": 0.9 * 0.98}) for request in requests()]
    assert outcomes(verdicts(scorer, said_by(policy, warm))) == {AuditOutcome.HARD}


def test_work_for_another_seed_is_a_fault(policy: Path, scorer: ExactScorer) -> None:
    elsewhere = [request.model_copy(update={"seed": request.seed + 99}) for request in requests()]
    assert outcomes(verdicts(scorer, said_by(policy, elsewhere))) == {AuditOutcome.HARD}


def test_the_ordinary_engine_is_at_most_asked_a_question(policy: Path, scorer: ExactScorer) -> None:
    reports = verdicts(scorer, said_by(policy, requests(), dtype="float32"))
    assert outcomes(reports) <= {AuditOutcome.PASS, AuditOutcome.SOFT}


@pytest.mark.parametrize("damage", ["missing", "reshaped", "foreign"])
def test_tensors_that_do_not_fit_the_configuration_are_refused(policy: Path, tmp_path: Path, damage: str) -> None:
    folder = changed(policy, tmp_path / "damaged", lambda weight: weight)
    tensors = load_file(folder / "model.safetensors")
    name = sorted(tensors)[-1]
    if damage == "missing":
        del tensors[name]
    elif damage == "reshaped":
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors["a.stranger"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(AuditFailed, match="tensor"):
        ExactScorer(folder)


def test_tokens_beyond_the_vocabulary_are_refused(scorer: ExactScorer) -> None:
    with pytest.raises(AuditFailed, match="vocabulary"):
        scorer.score([Prefill(np.array([1], np.uint32), [np.array([10**6], np.uint32)], 1, 1.0)])


def _again(rows: tuple[Completion, ...], old: Completion, new: Completion) -> tuple[Completion, ...]:
    return tuple(new if row is old else row for row in rows)


def changed(policy: Path, folder: Path, change: object) -> Path:
    """A copy of a policy with every matrix changed."""
    folder.mkdir()
    for path in policy.iterdir():
        if path.suffix == ".safetensors":
            tensors = {
                name: change(tensor) if tensor.ndim == 2 else tensor  # type: ignore[operator]  # any function of a tensor
                for name, tensor in load_file(path).items()
            }
            save_file(tensors, folder / path.name)
        elif path.name != "canary.json":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def quantised(weight: torch.Tensor) -> torch.Tensor:
    scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
    return ((weight / scale).round().clamp(-127, 127) * scale).to(weight.dtype)
