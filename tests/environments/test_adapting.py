"""Libraries, seeds and splits, which all kinds of environments share."""

import importlib.util

import pytest

from coordinator.environments import adapting, textarena_game
from protocol.errors import ConfigInvalid


def test_a_missing_library_names_its_extra() -> None:
    with pytest.raises(ConfigInvalid, match="not installed") as caught:
        adapting.library("no_such_library", "textarena")
    assert caught.value.hint == "pip install 'echo-swarm[textarena]'"


@pytest.mark.skipif(importlib.util.find_spec("textarena") is not None, reason="the libraries are installed here")
def test_a_kind_without_its_library_names_the_extra() -> None:
    with pytest.raises(ConfigInvalid, match="not installed"):
        list(textarena_game.problems("train", 0, 1, id="Nim-v0"))


def test_seeds_of_the_splits_have_none_in_common() -> None:
    drawn = {split: list(adapting.seeds(split, 7, 500)) for split in ("train", "validation", "held_out")}
    assert drawn["train"] == list(adapting.seeds("train", 7, 500))
    assert drawn["train"] != list(adapting.seeds("train", 8, 500))
    assert drawn["held_out"] == list(adapting.seeds("held_out", 8, 500))
    assert len(set().union(*drawn.values())) == 1500
    assert all(0 <= seed < 1 << 31 for each in drawn.values() for seed in each)


def test_rows_are_split_by_their_digest() -> None:
    splits = [adapting.split_of({"number": number}) for number in range(2000)]
    assert splits == [adapting.split_of({"number": number}) for number in range(2000)]
    assert 120 < splits.count("held_out") < 280
    assert 120 < splits.count("validation") < 280
