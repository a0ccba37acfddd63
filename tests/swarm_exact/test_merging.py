"""Rounding with a fixed dither: small steps are published in the mean, and nothing else changes."""

import pytest
import torch

from coordinator.learner.rounding import PIECE, dithered

STEP = 1e-5
"""The change of a weight by one update of Adam, at a learning rate of 1e-5."""


def start(*shape: int, seed: int = 0) -> torch.Tensor:
    """Weights of a pretrained policy, which are bfloat16 numbers."""
    return (0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16().float()


def whole(weight: torch.Tensor, name: str = "layers.0.weight") -> torch.Tensor:
    return dithered(name, weight, slice(0, len(weight))).float()


def test_small_steps_are_published_in_the_mean() -> None:
    weight = start(512, 576)
    ways = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)).sign()
    for updates in (1, 3, 10):
        trained = weight + updates * STEP * ways
        moved = ((whole(trained) - weight) * ways).mean().item()
        assert moved == pytest.approx(updates * STEP, rel=0.05)
    nearest = (((weight + STEP * ways).bfloat16().float() - weight) * ways).mean().item()
    assert nearest < 0.2 * STEP, "rounded to the nearest, the first update would hardly be published"


def test_what_bfloat16_can_express_is_published_unchanged() -> None:
    weight = torch.cat(
        [start(64, 9).flatten(), torch.tensor([0.0, -0.0, 1.0, 2.0**-130, 3.3895e38]).bfloat16().float()]
    )
    assert torch.equal(whole(weight), weight)


def test_a_published_weight_is_a_neighbour_of_the_trained_one() -> None:
    weight = 0.05 * torch.randn(300, 70, generator=torch.Generator().manual_seed(2))
    published = whole(weight)
    assert torch.all((published - weight).abs() < 2.0**-7 * weight.abs())
    assert (published - weight).mean().abs() < 1e-5


def test_a_weight_that_did_not_move_keeps_its_bytes() -> None:
    before = start(64, 64) + STEP
    after = before.clone()
    after[:, ::2] += STEP
    assert torch.equal(whole(after)[:, 1::2], whole(before)[:, 1::2])
    assert not torch.equal(whole(after), whole(before))


@pytest.mark.parametrize("shape", [(7, 3), (5,), (4, 6, 5), (3, PIECE + 5), (PIECE + 5,), (0, 4)])
def test_the_rows_of_several_ranks_are_those_of_one(shape: tuple[int, ...]) -> None:
    weight = start(*shape) + STEP
    cut = len(weight) // 3
    parts = [dithered("w", weight[:cut], slice(0, cut)), dithered("w", weight[cut:], slice(cut, len(weight)))]
    assert torch.equal(torch.cat(parts).float(), whole(weight, "w"))
    if weight.ndim > 1:
        turned = weight.mT.contiguous().mT
        assert torch.equal(whole(turned, "w"), whole(weight, "w")), "the order in memory does not matter"


def test_weights_of_other_names_have_other_thresholds() -> None:
    weight = start(64, 64) + STEP
    assert not torch.equal(whole(weight, "a"), whole(weight, "b"))


def test_numbers_that_are_not_finite_stay_so() -> None:
    weight = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.5]])
    published = whole(weight)
    assert published[0, 0].isnan()
    assert published[0, 1:].tolist() == [float("inf"), -float("inf"), 0.5]
