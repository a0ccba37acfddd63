"""Padding: prompts to the left, completions to the right, and a mask that knows."""

import pytest
import torch

from coordinator.learner.batch import collate
from tests.coordinator.learner.groups import UNEQUAL, group


def test_groups_of_unequal_length_become_rectangles() -> None:
    data = collate(UNEQUAL)
    assert data.prompts.tolist() == [[0, 0, 19, 20, 31], [19, 20, 13, 21, 31], [0, 0, 0, 0, 31]]
    assert data.prompt_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]
    assert data.owners.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.tokens[:4].tolist() == [[21, 22, 2, 0], [23, 2, 0, 0], [2, 0, 0, 0], [24, 25, 26, 27]]
    assert data.mask.sum(1).tolist() == [3, 2, 1, 4, 2, 2]
    assert data.behaviour[1].tolist() == pytest.approx([-3.0, -0.1, 0.0, 0.0])
    assert data.rewards.tolist() == [1, 0, 0, 1, 0, 0]


def test_a_single_token_is_a_batch() -> None:
    data = collate([group(0, [31], [([2], [-1.0], 1.0)])])
    assert data.tokens.shape == data.mask.shape == (1, 1)
    assert data.tokens.dtype == torch.int64
