"""Text that people read: counts in words."""

import pytest

from protocol.text.plain import counted, duration_text, plural


@pytest.mark.parametrize(("count", "word"), [(0, "nodes"), (1, "node"), (2, "nodes"), (1001, "nodes")])
def test_only_one_is_singular(count: int, word: str) -> None:
    assert plural(count, "node") == word


def test_a_count_has_its_thousands_apart() -> None:
    assert (counted(1, "node"), counted(1000, "entry", "entries")) == ("1 node", "1,000 entries")


def test_what_is_not_formed_by_an_s_is_said() -> None:
    assert [plural(count, "entry", "entries") for count in (1, 2)] == ["entry", "entries"]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0 s"),
        (0.0004, "0 s"),
        (0.02, "0.02 s"),
        (0.3, "0.3 s"),
        (0.94, "0.9 s"),
        (0.96, "1 s"),
        (1.4, "1 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
    ],
)
def test_a_time_below_a_second_is_not_nothing(seconds: float, said: str) -> None:
    assert duration_text(seconds) == said
