"""The auditor's memory: predicted from config.json alone, and measured on a version that is replayed."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.audit.scorer import BODY_TOKENS_MAX, VersionScorer
from coordinator.config import Config, parse
from coordinator.learner.auditor_memory import PROCESS_BYTES, AuditorNeed, auditor_need, measures_rounding
from coordinator.learner.memory import LargestBatch
from coordinator.rules.replay import Prefill
from tests.coordinator.learner.test_preflight import SHAPES
from tests.live_bytes import live_bytes
from tests.tiny_policy import make_other_policy

PROMPT, LENGTH, SAMPLES = 40, 120, 8
GROUPS = BODY_TOKENS_MAX // (PROMPT + SAMPLES * LENGTH)
"""Groups that fill one pass."""


def round_of(**audit: Any) -> Config:
    sampling = {"max_new_tokens": LENGTH, "samples_per_group": SAMPLES}
    return parse({"sampling": sampling, "audit": audit})


def predicted(shape: str, dtype: torch.dtype, **audit: Any) -> AuditorNeed:
    described = copy.deepcopy(SHAPES[shape])
    described.dtype = dtype
    batch = LargestBatch(groups=GROUPS, samples=SAMPLES, prompt=PROMPT)
    return auditor_need(round_of(**audit), described, batch.fullest_piece(BODY_TOKENS_MAX, LENGTH))


def claims() -> list[Prefill]:
    """Return claims as long as they may be, drawn at temperatures of their own."""
    chance = np.random.Generator(np.random.Philox(7))
    return [
        Prefill(
            chance.integers(3, 300, PROMPT - number % 2).astype(np.uint32),
            [chance.integers(3, 300, LENGTH).astype(np.uint32) for _ in range(SAMPLES)],
            number,
            1.0,
            0.7,
        )
        for number in range(GROUPS)
    ]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ("many layers", torch.bfloat16),
        pytest.param("many words", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("wide layers", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("five layers", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_predicted_bytes_of_a_replay_are_those_that_are_measured(
    shape: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    scorer = VersionScorer(make_other_policy(tmp_path / "version", SHAPES[shape], dtype=dtype))
    version = sum(weight.nbytes for weight in scorer._model.parameters())
    with live_bytes() as replay:
        scorer.score(claims())
    need = predicted(shape, dtype)
    assert need.loaded_bytes == version
    assert need.phases["replay"] - 2 * version == pytest.approx(replay.peak, rel=0.1)


def test_rounding_needs_a_version_in_16_bits_unless_no_node_may_compute_so() -> None:
    need = predicted("five layers", torch.bfloat16)
    assert need.phases["rounding"] - need.phases["replay"] == 2 * need.parameters
    assert "rounding" not in predicted("five layers", torch.bfloat16, classes=["torch/fp32/cpu"]).phases
    assert measures_rounding(["torch/fp32/cpu", "vllm/bf16/cuda"])


def test_weights_for_a_card_pass_through_the_memory_of_the_machine() -> None:
    on_card, on_cpu = (predicted("five layers", torch.bfloat16, device=device) for device in ("cuda:1", "cpu"))
    assert on_card.host_bytes == PROCESS_BYTES["cuda"] + on_card.loaded_bytes
    assert on_cpu.host_bytes == PROCESS_BYTES["cpu"] + on_cpu.peak_bytes
