"""One child with vLLM for most tests, since each start costs twenty seconds; and policies that its CPU build runs."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from coordinator.learner.embedded import EmbeddedShape, make_policy
from swarm_node.engine.vllm import command
from tests.processes.programs import Swarm
from tests.swarm_node.engine.asking import SIZES
from tests.tiny_policy import make_other_policy, with_canary
from tests.vllm.child import Child

SHAPE = EmbeddedShape(hidden=64, layers=2, heads=2, intermediate=96)
"""A shape whose heads have 32 dimensions, the fewest that vLLM's attention takes on a CPU."""


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter of vLLM's environment."""
    if not (named := os.environ.get("SWARM_VLLM_PYTHON")):
        pytest.skip("vLLM has an environment of its own, 3.5 GB: `make test-vllm` makes it and runs this")
    return named


@pytest.fixture(scope="session")
def child(python: str) -> Iterator[Child]:
    """An engine that every test leaves idle; which policy is in it, nobody knows."""
    with Child(command.command(python, threads=1, dtype="float32")) as child:
        yield child


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder as the demo has it."""
    return _made(tmp_path_factory.mktemp("policy"), seed=1)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy folder with other weights."""
    return _made(tmp_path_factory.mktemp("other"), seed=2)


@pytest.fixture(scope="session")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Grouped queries, a head of its own, bf16 weights and several files."""
    config = Qwen3Config(
        **(SIZES | {"head_dim": 32, "max_position_embeddings": 512}),
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    folder = tmp_path_factory.mktemp("grouped")
    return make_other_policy(folder, config, dtype=torch.bfloat16, part_size="20KB")


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Swarm]:
    """The programs of a test; none outlives it."""
    made = Swarm(tmp_path)
    yield made
    made.close()


def _made(folder: Path, seed: int) -> Path:
    make_policy(folder, seed=seed, shape=SHAPE)
    return with_canary(folder)
