"""The canary on a trained model: sound weights pass in every precision, and unsound ones are found."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.learner.policy import Policy
from coordinator.learner.settings import TrainSettings
from protocol.canary import FILE_NAME, TOKENS, Canary
from protocol.errors import EngineFailed
from swarm_node.engine import canary
from swarm_node.engine.generic import Generic
from tests.real.smollm2 import COPY_OF_THE_GGUF

LAYERS = 30
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SABOTAGED = [(layer, name) for layer in range(LAYERS) for name in PROJECTIONS][::2]
"""Every second one of 210 projections: 105, of every layer and kind."""


@pytest.fixture(scope="module")
def version(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as the learner publishes it."""
    folder = tmp_path_factory.mktemp("smollm2") / "version"
    Policy(smollm2_folder, TrainSettings(learning_rate=1e-5)).save_hub(folder)
    return folder


def decoder(folder: Path, dtype: torch.dtype) -> Any:
    return Generic(folder, torch.device("cpu"), dtype)


def check(folder: Path, model: Any) -> None:
    canary.check(folder, partial(canary.score, model), vocab_size=model.vocab_size, numerics=model.numerics)


def test_the_canary_is_ordinary_text_and_its_noise_is_published(version: Path) -> None:
    said = Canary.from_value(json.loads((version / FILE_NAME).read_bytes()))
    assert len(said.tokens) == TOKENS
    assert sum(said.logprobs) / len(said.logprobs) > -5, "the model predicts the text"
    assert 0.03 < said.tolerance_nats("bf16") < 0.09
    assert 0.003 < said.tolerance_nats("fp16") < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sound_weights_pass(version: Path, dtype: torch.dtype) -> None:
    """In bf16 the old canary, of meaningless text, was 0.76 nats off where 0.15 were allowed."""
    check(version, decoder(version, dtype))


@pytest.fixture(scope="module")
def bf16(version: Path) -> Any:
    return decoder(version, torch.bfloat16)


def is_found(version: Path, model: Any, weight: torch.Tensor, damage: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Damage a weight in place, and return True if the canary finds it; the weight is as before afterwards."""
    before = weight.clone()
    weight.copy_(damage(weight))
    try:
        check(version, model)
    except EngineFailed:
        return True
    finally:
        weight.copy_(before)
    return False


def test_one_projection_scaled_by_a_tenth_is_found(version: Path, bf16: Any) -> None:
    weights = dict(bf16._model.named_parameters())
    missed = []
    for layer, name in SABOTAGED:
        part = "mlp" if name in PROJECTIONS[4:] else "self_attn"
        weight = weights[f"model.layers.{layer}.{part}.{name}.weight"]
        if not is_found(version, bf16, weight, lambda tensor: tensor * 0.1):
            missed.append((layer, name))
    assert not missed
    check(version, bf16)


def test_keys_in_the_place_of_queries_are_found(version: Path, bf16: Any) -> None:
    weights = dict(bf16._model.named_parameters())
    missed = []
    for layer in range(LAYERS):
        keys = weights[f"model.layers.{layer}.self_attn.k_proj.weight"]
        queries = weights[f"model.layers.{layer}.self_attn.q_proj.weight"]
        if not is_found(version, bf16, queries, lambda tensor, keys=keys: keys.repeat(3, 1)):  # type: ignore[misc]  # a default binds the loop's value
            missed.append(layer)
    assert not missed


def test_the_folder_has_no_copy_of_the_gguf(smollm2_folder: Path) -> None:
    assert not (smollm2_folder / COPY_OF_THE_GGUF).exists()
    assert sum(path.stat().st_size for path in smollm2_folder.iterdir()) < 280e6
