"""Small moments: an update stays close to AdamW's, a resumed one is the same, and bytes are what the settings say."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from coordinator.learner.algorithm import PRESETS
from coordinator.learner.optimizer import MOMENTS, SmallAdamW, rounded
from coordinator.learner.policy import TrainedPolicy
from coordinator.learner.settings import TrainSettings
from tests.coordinator.learner.groups import UNEQUAL

PLAIN = TrainSettings(learning_rate=1e-3, warmup_updates=1, algorithm=PRESETS["echo2"])  # which drops no sample
SMALL = {
    "bfloat16": replace(PLAIN, optimizer_dtype="bfloat16"),
    "on the host": replace(PLAIN, optimizer_offload=True),
    "bfloat16 on the host": replace(PLAIN, optimizer_dtype="bfloat16", optimizer_offload=True),
}
UPDATES = 12


def weights(policy: TrainedPolicy) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in policy.model.parameters()])


@pytest.mark.parametrize("name", SMALL)
def test_updates_stay_close_to_those_of_float32_moments(name: str, policy_folder: Path) -> None:
    exact, small = TrainedPolicy(policy_folder, PLAIN), TrainedPolicy(policy_folder, SMALL[name])
    start = weights(exact)
    for _ in range(UPDATES):
        exact.train_step(UNEQUAL)
        small.train_step(UNEQUAL)
    way, ours = weights(exact) - start, weights(small) - start
    most = 0.05 if "bfloat16" in name else 1e-3
    assert float((ours - way).norm() / way.norm()) < most


@pytest.mark.parametrize("name", SMALL)
def test_an_update_after_a_resume_is_the_same_bit_for_bit(name: str, policy_folder: Path, tmp_path: Path) -> None:
    policy = TrainedPolicy(policy_folder, SMALL[name])
    for _ in range(2):
        policy.train_step(UNEQUAL)
    policy.save(tmp_path / "checkpoints")
    resumed = TrainedPolicy(policy_folder, SMALL[name])
    resumed.restore(tmp_path / "checkpoints" / f"{policy.update:09d}")
    for _ in range(2):
        policy.train_step(UNEQUAL)
        resumed.train_step(UNEQUAL)
    assert torch.equal(weights(policy), weights(resumed))
    for ours, theirs in zip(policy.model.parameters(), resumed.model.parameters(), strict=True):
        for moment in MOMENTS:
            assert torch.equal(policy._optimizer.state[ours][moment], resumed._optimizer.state[theirs][moment])


def test_moments_in_bfloat16_are_four_bytes_for_each_parameter(policy_folder: Path) -> None:
    found = {}
    for way, settings in {"float32": PLAIN, **SMALL}.items():
        policy = TrainedPolicy(policy_folder, settings)
        policy.train_step(UNEQUAL)
        moments = [state[name] for state in policy._optimizer.state.values() for name in MOMENTS]
        found[way] = sum(moment.nbytes for moment in moments) / policy.model.num_parameters()
    assert found == {"float32": 8.0, "bfloat16": 4.0, "on the host": 8.0, "bfloat16 on the host": 4.0}


def test_rounding_at_random_loses_nothing_on_average() -> None:
    """A value 1/64 of the way to the next bfloat16: rounding to the nearest would always give 1."""
    value = torch.full((100_000,), 1 + 2**-13)
    found = rounded(value, torch.Generator().manual_seed(1))
    assert set(found.tolist()) == {1.0, 1 + 2**-7}
    assert abs(float((found.float() - 1).mean()) / 2**-13 - 1) < 0.1
    whole = torch.tensor([0.0, -2.0, 0.5, float("inf")])
    assert torch.equal(rounded(whole, torch.Generator()), whole.to(torch.bfloat16))


def test_a_moment_that_changes_by_less_than_a_step_still_follows() -> None:
    """The decay of 0.999 changes the second moment by 1/1000 per step: rounding to the nearest would lose that."""
    weight = torch.nn.Parameter(torch.zeros(4096))
    group = {"params": [weight], "weight_decay": 0.0}
    optimizer = SmallAdamW([group], lr=0.0, betas=(0.9, 0.999), eps=1e-8, dtype=torch.bfloat16, on_host=False, seed=0)
    for size in [1.0] * 20 + [0.5] * 1000:
        weight.grad = torch.full_like(weight, size)
        optimizer.step()
    expected = 0.25 + ((1 - 0.999**20) - 0.25) * 0.999**1000
    assert float(optimizer.state[weight]["exp_avg_sq"].float().mean()) == pytest.approx(expected, rel=0.02)
