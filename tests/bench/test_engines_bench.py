"""The policies on which engines are timed are such as an engine loads."""

from pathlib import Path

from bench.engines import make_version
from coordinator.learner.embedded import EmbeddedShape
from swarm_node.engine.torch.engine import TorchEngine


def test_what_the_bench_makes_is_loaded_and_swapped(tmp_path: Path) -> None:
    shape = EmbeddedShape(hidden=16, layers=1, heads=2, intermediate=32)
    engine = TorchEngine()
    for version in (1, 2):
        loaded = engine.load(make_version(tmp_path / f"version-{version}", version, shape), version)
        assert loaded.rebuilt == (version == 1)
