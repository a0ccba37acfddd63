"""The embedded policy is what any published model is, and the same for the same seed."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coordinator.learner.embedded import make_model, make_tokenizer
from coordinator.learner.embedded_text import END
from tests.tiny_policy import make_tiny_policy


def test_the_hub_loaders_read_the_folder(policy_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(END) == tokenizer.eos_token_id
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    assert len(tokenizer) == model.config.vocab_size


@pytest.mark.parametrize("text", ["47+38=", "0123456789", "naïve ३ 🦀 line\n\n next", ""])
def test_any_text_survives_the_tokenizer(policy_folder: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_character_of_a_sum_is_one_token() -> None:
    tokenizer = make_tokenizer()
    assert len(tokenizer("47+38=").input_ids) == 6
    assert len(set(tokenizer("0123456789+=").input_ids)) == 12


def test_the_default_model_has_one_to_three_million_parameters() -> None:
    model = make_model(make_tokenizer(), seed=0)
    assert 1e6 <= sum(tensor.numel() for tensor in model.parameters()) <= 3e6


def test_the_same_seed_gives_the_same_bytes_and_leaves_chance_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    folders = [make_tiny_policy(tmp_path / str(number), seed=seed) for number, seed in enumerate((1, 1, 2))]
    assert torch.equal(torch.rand(3), expected)
    one, same, other = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert one == same
    assert one["tokenizer.json"] == other["tokenizer.json"]
    assert one["model.safetensors"] != other["model.safetensors"]
