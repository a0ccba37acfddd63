"""Rounding with a fixed dither: small steps are published in the mean, and nothing else changes.

numpy and torch round to the same bits; the former is what a client without torch has.
"""

import numpy as np
import pytest
import torch

from protocol.policy import rounding
from protocol.policy.rounding import PIECE
from swarm_exact.merging import dithered, merged

STEP = 1e-5
"""The change of a weight by one update of Adam, at a learning rate of 1e-5."""


HALVES = (slice(0, 200), slice(200, 512))

EXAMPLE = [40642, 63155, 55296, 10205]

EXAMPLE_ROUNDED = [0x3F81, 0x3F80, 0x3F81]


def start(*shape: int, seed: int = 0) -> torch.Tensor:
    """Weights of a pretrained policy, which are bfloat16 numbers."""
    return (0.05 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16().float()


def whole(weight: torch.Tensor, name: str = "layers.0.weight") -> torch.Tensor:
    return dithered(name, weight).float()


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
    parts = [dithered("w", weight[:cut]), dithered("w", weight[cut:], cut)]
    assert torch.equal(torch.cat(parts).float(), whole(weight, "w"))
    by_numpy = rounding.dithered("w", weight.numpy())
    assert by_numpy.tobytes() == dithered("w", weight).view(torch.int16).numpy().tobytes()
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
    by_numpy = torch.from_numpy(rounding.dithered("w", weight.numpy()).view(np.int16)).view(torch.bfloat16)
    assert by_numpy[0, 0].isnan()
    assert by_numpy[0, 1:].tolist() == [float("inf"), -float("inf"), 0.5]


def test_what_an_adapter_learned_is_in_the_merged_weight_in_the_mean() -> None:
    """The product is a hundredth of a step of bfloat16: to the nearest, the merged weight would be the base."""
    weight = start(512, 576)
    random = torch.Generator().manual_seed(1)
    down, up = 0.02 * torch.randn(8, 576, generator=random), 1e-4 * torch.randn(512, 8, generator=random)
    learned = up @ down
    made = merged("w", weight.bfloat16(), down, up, 0.5)
    assert made.dtype == torch.bfloat16
    share = ((made.float() - weight) * learned).sum() / learned.square().sum()
    assert share.item() == pytest.approx(0.5, rel=0.1)
    nearest = (((weight + 0.5 * learned).bfloat16().float() - weight) * learned).sum() / learned.square().sum()
    assert nearest.item() < 0.1
    rows = [merged("w", weight[part].bfloat16(), down, up[part], 0.5, first=part.start) for part in HALVES]
    assert torch.equal(torch.cat(rows), made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_merged_weights_of_other_types_are_rounded_to_the_nearest(dtype: torch.dtype) -> None:
    weight, down, up = start(16, 8).to(dtype), torch.ones(2, 8), torch.full((16, 2), 1e-3)
    assert torch.equal(merged("w", weight, down, up, 1.0), (weight.float() + 2e-3).to(dtype))


def test_the_protocols_example() -> None:
    """The example of the docstring of `rounding`, from which another client is checked."""
    rows, columns = rounding.thresholds("model.norm.weight", 0, 3, 1)
    assert [*rows.tolist(), *columns.tolist()] == EXAMPLE
    values = np.full(3, 1 + 2.0**-8, np.float32)  # half a step above 1
    assert rounding.dithered("model.norm.weight", values).tolist() == EXAMPLE_ROUNDED
