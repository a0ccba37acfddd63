"""Tiny policies for all tests of the engines, and the engines; nobody changes them."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from swarm_node.engine.engine import Engine
from swarm_node.engine.llama.engine import LlamaEngine
from swarm_node.engine.torch.engine import TorchEngine
from tests.swarm_node.engine.asking import SIZES
from tests.tiny_policy import make_other_policy, make_tiny_policy, with_canary

Make = Callable[..., Engine]

ENGINES: dict[str, Make] = {"torch": TorchEngine, "llama": partial(LlamaEngine, dtype="float32")}
"""All of them, as exact as they can be; each takes the number of slots."""


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder as the demo has it."""
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from threads, and threads that wait for each other on a busy machine lose much."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=ENGINES)
def make(request: pytest.FixtureRequest) -> Make:
    """Makes an engine of each kind."""
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def engine(make: Make, policy: Path) -> Engine:
    engine = make()
    engine.load(policy, 1)
    return engine


@pytest.fixture(scope="session")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 with grouped queries, a head of its own, bf16 weights and several files."""
    folder = tmp_path_factory.mktemp("grouped")
    config = Qwen3Config(
        **SIZES, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
    )
    made = make_other_policy(folder, config, dtype=torch.bfloat16, part_size="20KB")
    assert len(list(made.glob("*.safetensors"))) > 1
    return made


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose fused matrices are cut into tiles."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 256}
    config = Qwen3Config(**(SIZES | sizes), tie_word_embeddings=True)
    return make_other_policy(tmp_path_factory.mktemp("wide"), config, dtype=torch.float32)


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral, which our own decoder for torch does not know."""
    config = MistralConfig(**SIZES, sliding_window=None, tie_word_embeddings=False)
    return make_other_policy(tmp_path_factory.mktemp("foreign"), config, dtype=torch.float32)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama as SmolLM2 is: three heads for each key, and a tied embedding."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}
    config = LlamaConfig(**(SIZES | sizes), tie_word_embeddings=True)
    return make_other_policy(tmp_path_factory.mktemp("llama"), config, dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 whose biases are not zero, as transformers would make them."""
    folder = tmp_path_factory.mktemp("biased")
    config = Qwen2Config(**(SIZES | {"head_dim": 8}), tie_word_embeddings=False)  # llama.cpp knows no other head
    make_other_policy(folder, config, dtype=torch.float32)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for number, name in enumerate(name for name in tensors if name.endswith(".bias")):
        tensors[name] = 0.3 * torch.randn(len(tensors[name]), generator=torch.Generator().manual_seed(number))
    save_file(tensors, file, {"format": "pt"})
    return with_canary(folder)


@pytest.fixture(
    params=[
        *(("torch", policy) for policy in ("policy", "grouped", "wide", "foreign", "llama", "biased")),
        *(("llama", policy) for policy in ("policy", "grouped", "foreign", "llama", "biased")),
    ],
    ids="-".join,
)
def pair(request: pytest.FixtureRequest) -> tuple[Make, Path]:
    """An engine and a policy that it knows."""
    engine, policy = request.param
    return ENGINES[engine], request.getfixturevalue(policy)


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral whose layers see a window of the text, which llama.cpp does not compute."""
    config = MistralConfig(**SIZES, sliding_window=4)
    return make_other_policy(tmp_path_factory.mktemp("windowed"), config, dtype=torch.float32)
