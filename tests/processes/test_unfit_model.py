"""A round whose model this machine cannot sample: the node says so and ends before it registers or downloads."""

from pathlib import Path

import pytest
import torch
from transformers import MistralConfig

from tests.processes.programs import PATIENCE_S, Swarm
from tests.processes.rounds import NOBODY_LEARNS, Coordinator, join, operator_of
from tests.swarm_node.engine.asking import SIZES
from tests.tiny_policy import make_other_policy

pytestmark = pytest.mark.processes


def test_a_node_that_cannot_sample_the_model_neither_registers_nor_downloads(swarm: Swarm) -> None:
    """The earlier bug: such a node registered, fetched every version, and stayed without work."""
    config = MistralConfig(**SIZES, sliding_window=4)
    policy = make_other_policy(swarm.folder / "windowed", config, dtype=torch.float32)
    coordinator = Coordinator(swarm, NOBODY_LEARNS).start()
    operator_of(swarm, coordinator, policy).publish()
    node = join(swarm, "node", coordinator.join_string, "--engine", "llama")
    assert node.process.wait(timeout=PATIENCE_S) == 1
    assert "does not support this policy (mistral): llama.cpp computes its attention without windows" in node.log
    assert not coordinator.leaderboard()
    homes = [path for path in Path(swarm.folder).rglob("policies") if any(path.iterdir())]
    assert not homes
