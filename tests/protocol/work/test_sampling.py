"""Seed-bound sampling: the golden vectors that freeze it, and what it promises at its edges."""

from pathlib import Path

import numpy as np
import pytest

from protocol.errors import NonFiniteNumber
from protocol.work.sampling import pick, uniform_table, uniforms

SEED_MAX = 2**64 - 1
"""Seeds and sample numbers are the two 64-bit words of a Philox key."""


JUST_BELOW_ONE = 1 - 2.0**-53

GOLDEN = {
    (0, 0): [
        "0x1.7a5d3204726c0p-7",
        "0x1.eeb1585ce5460p-3",
        "0x1.c8667a55d9028p-4",
        "0x1.20faf40a5fab6p-1",
        "0x1.0137e64510730p-1",
    ],
    (7, 3): [
        "0x1.edb31ec618b30p-2",
        "0x1.72c1e5d4967f1p-1",
        "0x1.9bae5c02bbd60p-5",
        "0x1.43b6c348a9a9ap-2",
        "0x1.5c8b1237ef569p-1",
    ],
    (SEED_MAX, SEED_MAX): [
        "0x1.b51b3039c7c2ep-2",
        "0x1.249d42d27f351p-1",
        "0x1.fb86be0331922p-1",
        "0x1.694623e2f54cap-1",
        "0x1.9f84b07bfe378p-2",
    ],
}
"""(seed, sample) → the first five uniforms, bit for bit."""


@pytest.mark.parametrize("key", GOLDEN)
def test_golden_vectors(key: tuple[int, int]) -> None:
    assert [value.hex() for value in uniforms(*key, 5).tolist()] == GOLDEN[key]


@pytest.mark.parametrize(("seed", "sample"), [(0, 0), (1, 0), (0, 1), (2**63, 5), (SEED_MAX, SEED_MAX)])
def test_the_words_are_those_of_numpys_philox(seed: int, sample: int) -> None:
    raw = np.random.Philox(key=np.array([seed, sample], dtype=np.uint64)).random_raw(101)
    assert np.array_equal(uniforms(seed, sample, 101), (raw >> np.uint64(11)) * 2.0**-53)


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])  # below, at and above the four words of a block
def test_a_position_does_not_depend_on_how_many_are_drawn(count: int) -> None:
    assert np.array_equal(uniforms(9, 2, count), uniforms(9, 2, 64)[:count])


def test_rows_of_a_table_do_not_depend_on_each_other() -> None:
    table = uniform_table([5, 5, SEED_MAX], [0, 1, 2], 7)
    alone = np.stack([uniforms(5, 0, 7), uniforms(5, 1, 7), uniforms(SEED_MAX, 2, 7)])
    assert np.array_equal(table, alone)


def test_uniforms_are_uniform() -> None:
    drawn = uniform_table(range(500), [0] * 500, 40)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.01
    counts = np.histogram(drawn, bins=10, range=(0, 1))[0]
    assert np.abs(counts - 2000).max() < 200


@pytest.mark.parametrize(
    ("uniform", "token"),
    [
        (0.0, 0),
        (0.2499, 0),
        (0.25, 1),  # an edge belongs to the token above it
        (0.7499, 1),
        (0.75, 3),  # token 2 has no probability
        (JUST_BELOW_ONE, 3),
    ],
)
def test_pick_inverts_the_cumulative_distribution_in_token_order(uniform: float, token: int) -> None:
    assert pick(np.array([0.25, 0.5, 0.0, 0.25, 0.0]), uniform) == token


@pytest.mark.parametrize("total", [0.1, 0.3, 1 - 1e-7, 1.0, 1 + 1e-7, 3.0])
def test_probabilities_that_do_not_add_up_never_pick_past_the_end(total: float) -> None:
    row = np.array([0.0, total / 3, total / 3, total / 3, 0.0], dtype=np.float32)
    assert {pick(row, uniform) for uniform in (0.0, 0.5, JUST_BELOW_ONE)} == {1, 2, 3}


@pytest.mark.parametrize("row", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_what_is_no_distribution_is_refused(row: list[float]) -> None:
    with pytest.raises(NonFiniteNumber):
        pick(np.array(row), 0.5)


def test_the_example_in_the_protocol_document_is_true() -> None:
    """Another implementer starts from there."""
    said = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text()
    words = np.random.Philox(key=np.array([7, 3], dtype=np.uint64)).random_raw(5).tolist()
    chances = uniforms(7, 3, 5).tolist()
    for shown in (*(f"{word:016x}" for word in words), *map(repr, chances)):
        assert shown in said
    tokens = [pick(np.array([0.25, 0.5, 0.0, 0.25]), chance) for chance in chances]
    assert f"the tokens are\n{', '.join(map(str, tokens))}." in said
