"""A policy small enough to load and run in milliseconds, for the tests of the engine and of the learner."""

from pathlib import Path

from coordinator.learner.embedded import Shape, make_policy

TINY = Shape(hidden=32, layers=2, heads=2, intermediate=48)


def make_tiny_policy(folder: Path, *, seed: int = 1) -> Path:
    """An untrained policy in hub format."""
    make_policy(folder, seed=seed, shape=TINY)
    return folder
