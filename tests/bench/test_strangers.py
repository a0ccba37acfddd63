"""The bench of free keys: its cells, and the halves that it plays."""

import importlib
import inspect

import pytest

from bench.strangers.__main__ import present
from bench.strangers.cells import ADDRESSES, HONEST, KINDS, cells


def test_every_combination_is_a_cell_with_a_name_of_its_own() -> None:
    every = list(cells(list(HONEST), list(KINDS), list(ADDRESSES)))
    assert len({cell.name for cell in every}) == len(every) == len(HONEST) * len(KINDS) * len(ADDRESSES)


def test_leases_are_a_half() -> None:
    assert "leases" in present()


@pytest.mark.parametrize("half", present())
def test_a_half_gives_rows_for_the_options_of_the_whole(half: str) -> None:
    module = importlib.import_module(f"bench.strangers.{half}")
    assert list(inspect.signature(module.rows).parameters) == ["options", "quick"]
    assert all(isinstance(kind, str) for kind in module.KINDS)
