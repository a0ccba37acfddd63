"""The llama engine on a trained model: SmolLM2, which has the architecture of Llama."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from protocol.errors import EngineFailed
from protocol.work.rollout import unpack_logprobs, unpack_tokens
from swarm_node.engine.llama.engine import LlamaEngine
from tests.swarm_node.engine.asking import asked, sample

NATS_MEAN = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 5e-2, "q8_0": 8e-2}
"""The distance from what the model says in float32, for 64 tokens; q8_0 is about as near to it as bf16."""


@pytest.fixture(scope="module")
def version(smollm2_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Publish the model with its canary, as the learner does."""
    folder = tmp_path_factory.mktemp("llama") / "version"
    TrainedPolicy(smollm2_folder, TrainSettings(learning_rate=1e-5)).writer.save_hub(folder)
    return folder


@pytest.fixture(scope="module")
def model(version: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(version, dtype=torch.float32)


@pytest.mark.parametrize("dtype", NATS_MEAN)
def test_it_gives_its_canary_and_samples_with_the_log_probabilities_of_the_model(
    version: Path, model: Any, dtype: str
) -> None:
    engine, tokenizer = LlamaEngine(dtype=dtype), AutoTokenizer.from_pretrained(version)
    engine.load(version, 1)  # refused if the canary is wrong
    prompt = tokenizer.encode("The capital of France is")
    (group,) = sample(engine, asked(prompt, samples=4, max_new_tokens=16)).values()
    errors = []
    for one in group:
        tokens = torch.tensor(unpack_tokens(one.tokens).tolist())
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        said = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        errors.append((torch.tensor(unpack_logprobs(one.logprobs)) - said).abs().mean())
    assert torch.stack(errors).mean() < NATS_MEAN[dtype]


@pytest.mark.parametrize("name", ["layers.5.self_attn.v_proj", "layers.29.self_attn.q_proj"])
def test_the_weakest_projections_scaled_by_a_tenth_are_found_in_eight_bits(
    version: Path, tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(version, tmp_path / "version")
    (part,) = folder.glob("*.safetensors")
    tensors = load_file(part)
    tensors[f"model.{name}.weight"] *= 0.1
    save_file(tensors, part, metadata={"format": "pt"})
    with pytest.raises(EngineFailed, match="does not give its canary"):
        LlamaEngine(dtype="q8_0").load(folder, 1)
