"""Each example is a configuration that is checked, and its learner fits on the cards that the file names."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.config import load
from coordinator.learner import memory_plan
from tests.processes.programs import free_address

PROMPT = 512
"""Tokens of the longest prompt, as `plan` assumes."""

EXAMPLES = Path(__file__).parents[3] / "examples"

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
}


def qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool) -> dict[str, Any]:
    """A configuration of the family by the figures that its authors published."""
    return QWEN3 | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "tie_word_embeddings": tied,
    }


SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

ROUNDS = {
    "smollm2": (SMOLLM2, "8GiB:1", [], 134_515_008),
    "sums": (SMOLLM2, "16GiB:1", [], 134_515_008),
    "qwen3-0.6b-gsm8k": (qwen3(1024, 28, 16, 3072, tied=True), "4090:1", [], 596_049_920),
    "qwen3-4b-math": (qwen3(2560, 36, 32, 9728, tied=True), "4090:1", [], 4_022_468_096),
    "qwen3-4b-math, all weights": (
        qwen3(2560, 36, 32, 9728, tied=True),
        "h100:1",
        ["learner.lora_rank=0", "learner.learning_rate=1e-6"],
        4_022_468_096,
    ),
    "qwen3-8b-8gpu": (qwen3(4096, 36, 32, 12288, tied=False), "h100:7", [], 8_190_735_360),
}
"""Example → the model's configuration, the cards, settings on top, and the parameters that its authors count."""


def test_the_tutorials_round_fits_on_the_card_that_it_names(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "tutorial.md").read_text()
    said = re.search(r"```toml\n# round\.toml\n(.*?)```", page, re.DOTALL)
    plan = re.search(r"plan round\.toml --gpu (\S+) --prompt-tokens (\d+)\n", page)
    assert said
    assert plan
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    (tmp_path / "round.toml").write_text(said[1])
    config = load(tmp_path / "round.toml", [f'model.path="{tmp_path}"'])
    assert memory_plan.plan_only(config, memory_plan.parse(plan[1]), int(plan[2]))["fits"]


def test_every_example_of_a_real_model_is_among_these() -> None:
    real = {path.stem for path in EXAMPLES.glob("*.toml") if "hf://" in path.read_text()}
    assert real == {name.partition(",")[0] for name in ROUNDS}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_example_is_good(path: Path) -> None:
    """The check holds also while a round of this machine has the ports that the examples name."""
    addresses = (f"round.{name}={free_address()}" for name in ("listen", "seeder"))
    said = CliRunner().invoke(app, ["config", "check", str(path), *(f"--set={address}" for address in addresses)])
    assert said.exit_code == 0, said.output
    assert "is valid" in said.output


@pytest.mark.parametrize("name", ROUNDS)
def test_an_example_fits_on_the_cards_that_it_names(name: str, tmp_path: Path) -> None:
    model, cards, settings, parameters = ROUNDS[name]
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = load(EXAMPLES / f"{name.partition(',')[0]}.toml", [*settings, f'model.path="{tmp_path}"'])
    found = memory_plan.plan_only(config, memory_plan.parse(cards), PROMPT)
    assert found["fits"]
    assert found["auditor"]["fits"]
    assert found["parameters"] == parameters
