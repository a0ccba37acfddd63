"""Text that people read: counts in words."""

import pytest

from protocol.text.plain import counted, plural


@pytest.mark.parametrize(("count", "word"), [(0, "nodes"), (1, "node"), (2, "nodes"), (1001, "nodes")])
def test_only_one_is_singular(count: int, word: str) -> None:
    assert plural(count, "node") == word


def test_a_count_has_its_thousands_apart() -> None:
    assert (counted(1, "node"), counted(1000, "entry", "entries")) == ("1 node", "1,000 entries")


def test_what_is_not_formed_by_an_s_is_said() -> None:
    assert [plural(count, "entry", "entries") for count in (1, 2)] == ["entry", "entries"]
