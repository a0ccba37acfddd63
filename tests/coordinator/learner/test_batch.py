"""Padding with a mask that knows, and pieces of bounded size."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.model.batch import collate, pieces
from tests.coordinator.learner.groups import UNEQUAL, group


def test_groups_of_unequal_length_become_rectangles() -> None:
    data = collate(UNEQUAL)
    assert [prompt.tolist() for prompt in data.prompts] == [[19, 20, 31], [19, 20, 13, 21, 31], [31]]
    assert data.owners.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.tokens[:4].tolist() == [[21, 22, 2, 0], [23, 2, 0, 0], [2, 0, 0, 0], [24, 25, 26, 27]]
    assert data.lengths.tolist() == [3, 2, 1, 4, 2, 2]
    assert data.behaviour[1].tolist() == pytest.approx([-3.0, -0.1, 0.0, 0.0])
    assert data.rewards.tolist() == [1, 0, 0, 1, 0, 0]


def test_a_single_token_is_a_batch() -> None:
    data = collate([group(0, [31], [([2], [-1.0], 1.0)])])
    assert data.tokens.shape == data.mask.shape == (1, 1)
    assert data.tokens.dtype == torch.int64


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=5)), min_size=1, max_size=5),
    st.integers(0, 40),
    st.booleans(),
)
def test_pieces_hold_every_sample_once_within_their_budget(
    shape: list[tuple[int, list[int]]], budget: int, packed: bool
) -> None:
    groups = [
        group(number, [1] * prompt, [([2] * length, [-1.0] * length, 0.0) for length in lengths])
        for number, (prompt, lengths) in enumerate(shape)
    ]
    data = collate(groups)
    found = list(pieces(data, torch.arange(len(data.mask)), budget, packed=packed))
    assert sorted(torch.cat(found).tolist()) == list(range(len(data.mask)))
    for piece in found:
        prompts = sum(len(data.prompts[owner]) for owner in (set if packed else list)(data.owners[piece].tolist()))
        cost = int(data.lengths[piece].sum()) + prompts
        assert len(piece) == 1 or not budget or cost <= budget
    assert len(found) == 1 or budget


def test_what_a_reward_skips_is_fed_and_not_taught() -> None:
    """The loss and its shares look at `taught`; lengths, truncation and the check of claims at all that was drawn."""
    first = group(0, [31], [([21, 22, 23, 2], [-1.0] * 4, 1.0), ([24, 2], [-1.0] * 2, 0.0)])
    left, right = first.samples
    change = {"samples": (left.model_copy(update={"skip": ((0, 2), (3, 4)), "weight": 0.5}), right)}
    data = collate([first.model_copy(update=change)])
    assert data.mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert data.taught.tolist() == [[0, 0, 1, 0], [1, 1, 0, 0]]
    assert data.lengths.tolist() == [4, 2]
    assert data.weights.tolist() == [0.5, 1.0]


def test_an_environments_tokens_are_never_taught_whatever_is_skipped() -> None:
    first = group(0, [31], [([21, 22, 2], [-1.0] * 3, 1.0)])
    (only,) = first.samples
    played = only.model_copy(update={"sampled": bytes([1, 0, 1]), "skip": ((0, 1),)})
    assert collate([first.model_copy(update={"samples": (played,)})]).taught.tolist() == [[0, 0, 1]]
