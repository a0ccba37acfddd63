"""Rounding on a trained model: what the auditor measures by itself pays honest nodes in bf16, and finds cheats."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from bench.verification.cells import load
from bench.verification.cheats import quantised
from bench.verification.sampler import Group, sample
from coordinator.audit.reference_node import ReferenceNode
from coordinator.audit.rounding import drawings, honest_groups
from coordinator.audit.scorer import VersionScorer
from coordinator.rules.calibration import Tolerance, derive
from coordinator.rules.replay import Prefill, ReplayMeasurement, measure
from coordinator.rules.verdict import AuditOutcome, judge
from protocol.work.rollout import Completion, PolicyBounds, end_tokens, pack_tokens, unpack_tokens
from swarm_node.engine.messages import GroupDone, SampleRequest
from swarm_node.engine.torch.engine import TorchEngine

pytestmark = pytest.mark.slow  # a real model's calibration is long; coordinator/audit/test_rounding has a tiny one's

ROUND, CLASS = "a" * 64, "torch/bf16/cpu"
SAMPLES, NEW_TOKENS = 8, 24
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "What is the capital of France, and what is it known for?",
    "Explain photosynthesis to a child.",
    "How do I boil an egg?",
    "Name three inventions of the last century.",
    "Tell me a story about a fox.",
    "What is 12 + 30?",
)
HONEST, CHEATING = 4, 2
"""Groups."""


@pytest.fixture(scope="module")
def prompts(smollm2_folder: Path) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]


@pytest.fixture(scope="module")
def scorer(smollm2_folder: Path) -> VersionScorer:
    return VersionScorer(smollm2_folder)


@pytest.fixture(scope="module")
def tolerance(smollm2_folder: Path, prompts: list[list[int]], scorer: VersionScorer) -> Tolerance:
    """Measured on half of the prompts."""
    node = ReferenceNode(smollm2_folder, "bf16")
    asked = [(np.array(prompt, np.uint32), seed) for seed, prompt in enumerate(prompts[::2])]
    every = drawings(asked, max_new_tokens=NEW_TOKENS, temperature=1.0)
    return derive(node.numerics, list(honest_groups(every, node.sample, scorer.score)), ROUND)


@pytest.fixture(scope="module")
def groups(prompts: list[list[int]]) -> list[Group]:
    """Leases on the other half."""
    return [Group(number, prompts[1::2][number % 4], seed=1000 + number, samples=SAMPLES) for number in range(HONEST)]


@pytest.fixture(scope="module")
def bounds(smollm2_folder: Path) -> PolicyBounds:
    config, generation = (
        json.loads((smollm2_folder / name).read_bytes()) for name in ("config.json", "generation_config.json")
    )
    return PolicyBounds(config["vocab_size"], end_tokens(config, generation), NEW_TOKENS)


def replayed(
    scorer: VersionScorer, group: Group, said: Sequence[Completion], own: float | None = None
) -> ReplayMeasurement:
    claim = Prefill(np.array(group.prompt, np.uint32), [one.tokens for one in said], group.seed, 1.0, own)
    return measure(said, scorer.score([claim])[0])


def outcomes(measured: Iterable[ReplayMeasurement], tolerance: Tolerance) -> list[AuditOutcome]:
    return [judge(group, tolerance, 1).outcome for group in measured]


def test_honest_groups_of_the_engine_that_nodes_run_pass(
    smollm2_folder: Path, scorer: VersionScorer, tolerance: Tolerance, groups: list[Group]
) -> None:
    engine, done = TorchEngine(dtype="bfloat16"), list[GroupDone]()
    engine.load(smollm2_folder, 1)
    wanted = [
        SampleRequest(
            request_id=str(group.number),
            version=1,
            prompt=pack_tokens(group.prompt),
            seed=group.seed,
            samples=SAMPLES,
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
        )
        for group in groups
    ]
    engine.generate(wanted, done.append)
    said = {
        int(one.request_id): [
            Completion(unpack_tokens(row.tokens), np.frombuffer(row.logprobs, "<f4"), row.finish) for row in one.samples
        ]
        for one in done
    }
    found = outcomes((replayed(scorer, group, said[group.number]) for group in groups), tolerance)
    assert found == [AuditOutcome.PASS] * HONEST


def four_bits(model: Any) -> Any:
    return quantised(model, 4)


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (four_bits, {}),
        (None, {"temperature": 0.8}),
        (None, {"top_p": 0.9}),
    ],
    ids=["4-bit weights", "temperature 0.8", "top-p 0.9"],
)
def test_cheats_are_found_in_the_first_groups(
    smollm2_folder: Path,
    scorer: VersionScorer,
    tolerance: Tolerance,
    groups: list[Group],
    bounds: PolicyBounds,
    change: Callable[[Any], Any] | None,
    how: dict[str, float],
) -> None:
    model = load(smollm2_folder)
    model = change(model) if change else model
    as_drawn = [replayed(scorer, group, sample(model, [group], bounds, **how)[0]) for group in groups[:CHEATING]]
    prefilled = [replace(measured, claimed_logprobs=measured.logprobs) for measured in as_drawn]
    assert AuditOutcome.HARD in outcomes(as_drawn, tolerance)
    assert AuditOutcome.HARD in outcomes(prefilled, tolerance), "true log-probabilities do not hide other tokens"


@pytest.mark.parametrize("own", [0.0, 0.3, 2.0])
def test_leases_at_other_temperatures_are_judged_by_what_was_measured_at_the_versions(
    smollm2_folder: Path, scorer: VersionScorer, tolerance: Tolerance, groups: list[Group], own: float
) -> None:
    """Honest groups pass; those that were drawn at temperature 1 in spite of their lease do not."""
    engine, done = TorchEngine(dtype="bfloat16"), list[GroupDone]()
    engine.load(smollm2_folder, 1)
    wanted = [
        SampleRequest(
            request_id=f"{group.number} {drawn_at}",
            version=1,
            prompt=pack_tokens(group.prompt),
            seed=group.seed,
            samples=CHEATING,
            max_new_tokens=NEW_TOKENS,
            temperature=1.0,
            own_temperature=drawn_at,
        )
        for group in groups
        for drawn_at in (own, None)
    ]
    engine.generate(wanted, done.append)
    samples = {one.request_id: one.samples for one in done}

    def found(drawn_at: float | None) -> list[AuditOutcome]:
        said = [
            [
                Completion(unpack_tokens(row.tokens), np.frombuffer(row.logprobs, "<f4"), row.finish)
                for row in samples[f"{group.number} {drawn_at}"]
            ]
            for group in groups
        ]
        return outcomes((replayed(scorer, *pair, own) for pair in zip(groups, said, strict=True)), tolerance)

    assert found(own) == [AuditOutcome.PASS] * HONEST
    assert found(None) == [AuditOutcome.HARD] * HONEST
