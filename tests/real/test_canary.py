"""The canary on a trained model: sound weights pass in every precision, and unsound ones are found."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from transformers import AutoTokenizer

from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from protocol.errors import EngineFailed
from protocol.policy.canary import FILE_NAME, TOKENS, Canary
from swarm_node.engine import canary
from swarm_node.engine.torch.generic import Generic
from tests.real.smollm2 import COPY_OF_THE_GGUF

ALL = bool(os.environ.get("ALL"))
LAYERS = 30
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EVERY = [(layer, name) for layer in range(LAYERS) for name in PROJECTIONS]
WEAKEST = [(5, "v_proj"), (5, "o_proj")]
"""Two of the 210 weights that show least when scaled by a tenth; `make test-real ALL=1` damages every one."""

UPDATES_APART = 16
LEARNED = (
    "The harbour master counts ships at dawn and writes each name in a green book. When a ship is late, he rings the "
    "bell twice and asks the pilot. Add 17 and 25, then subtract 9: 33."
)

PRECISIONS = ("bf16", pytest.param("fp16", marks=pytest.mark.slow), pytest.param("q8_0", marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def version(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publish the model as the learner does."""
    folder = tmp_path_factory.mktemp("smollm2") / "version"
    TrainedPolicy(smollm2_folder, TrainSettings(learning_rate=1e-5)).writer.save_hub(folder)
    return folder


@pytest.fixture(scope="module")
def said(version: Path) -> Canary:
    return Canary.from_value(json.loads((version / FILE_NAME).read_bytes()))


@pytest.fixture(scope="module", params=PRECISIONS)
def model(version: Path, request: pytest.FixtureRequest) -> Any:
    """A model that computes in a lower precision; of q8_0, which only llama.cpp computes in, the weights alone."""
    dtype = torch.bfloat16 if request.param == "bf16" else torch.float32
    made: Any = Generic(version, torch.device("cpu"), dtype)
    made.numerics = f"torch/{request.param}/cpu"
    if request.param == "fp16":
        made._model.half()
    if request.param == "q8_0":
        for tensor in made._model.parameters():
            if tensor.dim() > 1:
                stored = quantize(tensor.numpy(), GGMLQuantizationType.Q8_0)
                tensor.copy_(torch.from_numpy(dequantize(stored, GGMLQuantizationType.Q8_0)))
    return made


def check(folder: Path, model: Any) -> None:
    canary.check(folder, partial(canary.score, model), vocab_size=model.vocab_size, numerics=model.numerics)


def test_the_canary_is_ordinary_text_and_its_noise_is_published(said: Canary) -> None:
    assert len(said.tokens) == TOKENS
    assert sum(said.logprobs) / len(said.logprobs) > -5, "the model predicts the text"
    assert 0.03 < said.tolerance_nats("bf16") < 0.09
    assert 0.003 < said.tolerance_nats("fp16") < 0.03


def test_sound_weights_pass_in_float32(version: Path) -> None:
    check(version, Generic(version, torch.device("cpu"), torch.float32))


def test_sound_weights_pass_in_a_lower_precision(version: Path, model: Any) -> None:
    """The canary of meaningless text was 0.76 nats off in bf16, where 0.15 were allowed."""
    check(version, model)


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


def test_one_projection_scaled_by_a_tenth_is_found(version: Path, model: Any) -> None:
    weights = dict(model._model.named_parameters())
    missed = []
    for layer, name in EVERY if ALL else WEAKEST:
        part = "mlp" if name in PROJECTIONS[4:] else "self_attn"
        weight = weights[f"model.layers.{layer}.{part}.{name}.weight"]
        if not is_found(version, model, weight, lambda tensor: tensor * 0.1):
            missed.append((layer, name))
    assert not missed
    check(version, model)


def test_keys_in_the_place_of_queries_are_found(version: Path, model: Any) -> None:
    weights = dict(model._model.named_parameters())
    missed = []
    for layer in range(LAYERS) if ALL else (0, 29):
        keys = weights[f"model.layers.{layer}.self_attn.k_proj.weight"].repeat(3, 1)
        queries = weights[f"model.layers.{layer}.self_attn.q_proj.weight"]
        if not is_found(version, model, queries, partial(_replaced, keys)):
            missed.append(layer)
    assert not missed


def _replaced(by: torch.Tensor, _tensor: torch.Tensor) -> torch.Tensor:
    return by


@pytest.fixture(scope="module")
def later(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train for so long that the text itself gets other probabilities, and publish."""
    policy = TrainedPolicy(smollm2_folder, TrainSettings(learning_rate=1e-5))
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2_folder, local_files_only=True)
    tokens = torch.tensor([tokenizer.encode(LEARNED)])
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-4)
    for _ in range(UPDATES_APART):
        policy.model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("smollm2") / "later"
    policy.writer.save_hub(folder)
    return folder


def stale(name: str) -> Callable[[str], bool]:
    """Return which parameters stay those of the version before."""
    layers = {"a layer": ("0",), "half of the layers": tuple(map(str, range(LAYERS // 2)))}.get(name, ())
    return lambda key: key.split(".")[2] in layers if ".layers." in key else name == "the head" and "embed" in key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("half of the layers", torch.bfloat16),
        ("the head", torch.bfloat16),
        ("half of the layers", torch.float32),
        ("the head", torch.float32),
        ("a layer", torch.float32),
    ],
    ids=str,
)
def test_what_stays_of_a_distant_version_is_found(version: Path, later: Path, name: str, dtype: torch.dtype) -> None:
    """One layer of 30 is less than the noise in bf16; versions 16 updates of 1e-5 apart cannot be told at all."""
    before: Any = Generic(version, torch.device("cpu"), dtype)
    model: Any = Generic(later, torch.device("cpu"), dtype)
    model.numerics = f"torch/{'bf16' if dtype == torch.bfloat16 else 'fp32'}/cpu"
    check(later, model)
    old = dict(before._model.named_parameters())
    for key, weight in model._model.named_parameters():
        if stale(name)(key):
            weight.copy_(old[key])
    with pytest.raises(EngineFailed, match="does not give its canary"):
        check(later, model)


def test_the_folder_has_no_copy_of_the_gguf(smollm2_folder: Path) -> None:
    assert not (smollm2_folder / COPY_OF_THE_GGUF).exists()
    assert sum(path.stat().st_size for path in smollm2_folder.iterdir()) < 280e6
