"""The root of a training state: it names every bit that the next update depends on, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coordinator.learner import checkpoint as module
from coordinator.learner.checkpoint import state_root
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.ranks import Ranks
from coordinator.learner.settings import TrainSettings
from tests.coordinator.learner.groups import UNEQUAL

SETTINGS = TrainSettings(learning_rate=1e-2, warmup_updates=1)


def trained(folder: Path, settings: TrainSettings = SETTINGS) -> TrainedPolicy:
    policy = TrainedPolicy(folder, settings)
    policy.train_step(UNEQUAL)
    return policy


@pytest.mark.parametrize(
    "settings",
    [
        SETTINGS,
        replace(SETTINGS, optimizer_dtype="bfloat16"),
        replace(SETTINGS, optimizer_offload=True),
        replace(SETTINGS, lora_rank=2, learning_rate=1e-3),
    ],
    ids=["float32", "bfloat16", "offload", "lora"],
)
def test_a_restored_state_has_the_root_of_the_saved_one_and_so_has_the_state_after_its_next_update(
    settings: TrainSettings, policy_folder: Path, tmp_path: Path
) -> None:
    policy = trained(policy_folder, settings)
    first = policy.rooting()()
    policy.save(tmp_path)
    policy.train_step(UNEQUAL)
    resumed = TrainedPolicy(policy_folder, settings)
    resumed.restore(tmp_path / "000000001")
    assert resumed.rooting()() == first
    resumed.train_step(UNEQUAL)
    assert resumed.rooting()() == policy.rooting()() != first


def _flip(tensor: torch.Tensor) -> None:
    """Flip the last bit of the last number."""
    tensor.detach().reshape(-1).view(torch.uint8)[-tensor.element_size()] ^= 1


def random_numbers_go_on() -> None:
    torch.rand(1)


CHANGES: dict[str, Callable[[TrainedPolicy], None]] = {
    "a bit of a weight": lambda policy: _flip(list(policy._trained.values())[-1]),
    "a bit of a moment": lambda policy: _flip(next(iter(policy._optimizer.state.values()))["exp_avg"]),
    "the optimizer's steps": lambda policy: next(iter(policy._optimizer.state.values()))["step"].add_(1),
    "the number of updates": lambda policy: setattr(policy, "update", 2),
    "random numbers": lambda policy: random_numbers_go_on(),
    "no optimizer": lambda policy: policy._optimizer.state.clear(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_of_the_state_is_another_root(
    change: Callable[[TrainedPolicy], None], policy_folder: Path
) -> None:
    policy = trained(policy_folder)
    before = policy.rooting()()
    assert policy.rooting()() == before
    change(policy)
    assert policy.rooting()() != before


def test_the_root_does_not_depend_on_the_order_or_the_layout_of_tensors() -> None:
    ranks = Ranks()
    table = torch.arange(12.0).reshape(3, 4)
    one = state_root({"a": table, "b": torch.ones(2)}, 1, 1, ranks)
    assert state_root({"b": torch.ones(2), "a": table.t().contiguous().t()}, 1, 1, ranks) == one
    assert state_root({"a": table.reshape(4, 3), "b": torch.ones(2)}, 1, 1, ranks) != one
    assert state_root({"a": table.to(torch.float64), "b": torch.ones(2)}, 1, 1, ranks) != one
    assert state_root({"b": table, "a": torch.ones(2)}, 1, 1, ranks) != one


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_a_tensor_of_several_parts_is_hashed_whole(extra: int) -> None:
    """One byte fewer than a part, a part, and one more; then a bit at each end of it."""
    table = torch.zeros(module.PART_BYTES + extra, dtype=torch.uint8)
    roots = {state_root({"a": table}, 1, 1, Ranks())}
    for place in (0, module.PART_BYTES - 2, len(table) - 1):
        changed = table.clone()
        changed[place] = 1
        roots.add(state_root({"a": changed}, 1, 1, Ranks()))
    assert len(roots) >= 3 + (extra >= 0)
