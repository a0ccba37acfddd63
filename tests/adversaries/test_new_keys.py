"""Lease hoarding with ever-new keys: each registers, leases one group and never answers, beside nodes that work.

- Leases, admission, intake, audits and batches are a coordinator's, on a real store, with the shipped settings.
- A turn is a second. New keys ask before anybody else, in every turn; a lease lasts for twenty.
- They call from addresses that stand for many, so that no budget of a neighbourhood holds them back.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.adversaries.test_hoarders import Round

TURN_MS = 1_000
TIMEOUT_MS = 20_000
WARM_UP, TURNS = 12, 60

FIXED_KEYS = 120

KEPT = 30
"""The newest keys, which go on asking; those before are given up."""


def updates(folder: Path, workers: int, *, fixed: int = 0, new_each_turn: int = 0) -> int:
    """The learner's updates in `TURNS` turns, with attackers that come when the workers are known."""
    world = Round(folder, turn_ms=TURN_MS, timeout_ms=TIMEOUT_MS)

    def plays() -> None:
        world.enter(workers)
        world.play(WARM_UP)
        before = world.update
        world.enter(0, fixed)
        for _ in range(TURNS):
            world.enter(0, new_each_turn)
            world.play(1)
        done.append(world.update - before)

    done = list[int]()
    world.whole(plays)
    return done[0]


@cache
def undisturbed_updates(workers: int) -> int:
    """Return the updates without attackers, once for all attacks."""
    with TemporaryDirectory() as folder:
        return updates(Path(folder), workers)


@pytest.mark.parametrize(
    ("workers", "attack"),
    [
        (1, {"fixed": FIXED_KEYS}),
        pytest.param(4, {"new_each_turn": 2}, marks=pytest.mark.slow),
        (4, {"new_each_turn": 20}),
        pytest.param(16, {"fixed": FIXED_KEYS}, marks=pytest.mark.slow),
        pytest.param(16, {"new_each_turn": 20}, marks=pytest.mark.slow),
    ],
)
def test_lease_hoarding_with_free_keys_leaves_the_learner_nine_tenths_of_its_updates(
    tmp_path: Path, workers: int, attack: dict[str, int]
) -> None:
    undisturbed = undisturbed_updates(workers)
    attacked = updates(tmp_path, workers, **attack)
    print(f"workers={workers} {attack}: {undisturbed} updates undisturbed, {attacked} attacked")
    assert undisturbed >= TURNS // 8
    assert 10 * attacked >= 9 * undisturbed


def test_a_round_that_ever_new_keys_entered_first_begins_all_the_same(tmp_path: Path) -> None:
    """All nodes are unproven, and all the room is held before the first honest node comes."""
    world = Round(tmp_path, turn_ms=TURN_MS, timeout_ms=TIMEOUT_MS)

    def plays() -> None:
        for turn in range(40):
            world.enter(4 if turn == 5 else 0, 10)
            world.play(1)
            del world.hoarders[:-KEPT]
        assert world.update >= 10, world.update

    world.whole(plays)


def test_newcomers_that_stay_have_their_turn_beside_ever_new_keys_that_ask_first(tmp_path: Path) -> None:
    world = Round(tmp_path, turn_ms=TURN_MS, timeout_ms=TIMEOUT_MS)

    def plays() -> None:
        world.enter(1)
        world.play(WARM_UP)
        for turn in range(40):
            world.enter(2 if turn == 10 else 0, 10)
            world.play(1)
            del world.hoarders[:-KEPT]
        done = [world.done.get(key, 0) for key in world.workers]
        assert min(done[1:]) > done[0] / 10, done

    world.whole(plays)
