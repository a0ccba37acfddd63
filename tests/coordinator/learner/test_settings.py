"""The objective that follows from the operator's settings."""

from math import inf
from pathlib import Path
from typing import get_args

import pytest

from coordinator.config import AlgorithmName, CorrectionSection, ObjectiveSection, load
from coordinator.learner.algorithm import PRESETS, Algorithm, Correction
from coordinator.learner.settings import algorithm, train_settings
from protocol.errors import ConfigInvalid


def test_every_preset_has_a_name_in_the_file_and_every_part_a_key() -> None:
    assert set(get_args(AlgorithmName)) == set(PRESETS)
    assert set(ObjectiveSection.model_fields) == set(Algorithm.__dataclass_fields__) - {"correction"}
    assert set(CorrectionSection.model_fields) == set(Correction.__dataclass_fields__)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_name_alone_is_its_preset(name: str) -> None:
    assert algorithm(load(None, [f"learner.algorithm={name}"])) == PRESETS[name]


def test_keys_change_parts_of_a_preset() -> None:
    found = algorithm(
        load(None, ["learner.algorithm=echo2", "objective.beta=0.1", "objective.delta=0", "correction.token_cap=5"])
    )
    assert (found.beta, found.delta, found.correction.token_cap) == (0.1, inf, 5.0)
    assert found.correction.veto == PRESETS["echo2"].correction.veto


def test_a_batch_has_a_group_for_each_minibatch() -> None:
    found = algorithm(load(None, ["learner.algorithm=gspo", "learner.groups_per_update=2"]))
    assert found.minibatches == 2, "what a preset chooses gives way"
    with pytest.raises(ConfigInvalid, match=r"only 2 groups \(learner.groups_per_update\)"):
        load(None, ["objective.minibatches=3", "learner.groups_per_update=2"])


def test_a_name_that_is_none_is_refused() -> None:
    for setting in ("learner.algorithm=ppo", "objective.clip=cispo2", "correction.mode=off", "learner.device=tpu"):
        with pytest.raises(ConfigInvalid):
            load(None, [setting])


def test_the_rest_of_the_section_becomes_settings() -> None:
    settings = train_settings(
        load(
            None, ["learner.lora_rank=8", "round.max_updates=7", "sampling.max_new_tokens=9", "learner.dtype=bfloat16"]
        )
    )
    assert (settings.lora_rank, settings.max_updates, settings.max_completion_length) == (8, 7, 9)
    assert settings.dtype == "bfloat16"


def test_the_demo_keeps_honest_samples_at_its_lag() -> None:
    found = algorithm(load(Path(__file__).parents[3] / "examples" / "demo.toml", []))
    assert (found.correction.sequence_low, found.correction.sequence_high) == (0.5, 2.0)
    assert found.loss_aggregation == "token"
