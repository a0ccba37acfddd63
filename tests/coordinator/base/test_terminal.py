"""Strangers' text on a terminal does nothing but stand there."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.base.terminal import GUTTER, block
from protocol.limits import NAME_MARKS_MAX
from protocol.text.plain import UNREADABLE

HOSTILE = {
    "clears the screen": ("\x1b[2Jgone", r"\x1b[2Jgone"),
    "sets the window's title": ("\x1b]0;root\x07", r"\x1b]0;root\x07"),
    "the same in one character": ("\x9b2J", r"\x9b2J"),
    "writes over the line": ("wrong\rright", r"wrong\x0dright"),
    "rubs out": ("a\x08b\x7f", r"a\x08b\x7f"),
    "turns the line around": ("\u202e001", r"\u202e001"),
    "shows nothing": ("\u200b\u2800", r"\u200b\u2800"),
    "no character": ("\ud800\U000e0001", r"\ud800\U000e0001"),
    "a line of its own": ("a\u2028reward 1", r"a\u2028reward 1"),
    "a heap of accents": ("e" + "\u0301" * 3, "e" + "\u0301" * 2 + r"\u0301"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_terminal_would_obey_is_written_out(what: str) -> None:
    said, shown = HOSTILE[what]
    assert block(said) == GUTTER + shown


def test_lines_and_letters_of_all_languages_stay() -> None:
    assert block("2 + 2 =\n\té 数 ש") == f"{GUTTER}2 + 2 =\n{GUTTER}    é 数 ש"
    assert block("") == GUTTER.rstrip()


def test_a_line_cannot_run_into_the_next_to_pass_for_ours() -> None:
    forged = " " * 36 + "reward 1"
    assert block(forged, 40) == f"{GUTTER.rstrip()}\n{GUTTER}reward 1"
    assert block("数" * 19, 40) == f"{GUTTER}{'数' * 18}\n{GUTTER}数"


@given(st.text(st.characters(), max_size=200), st.sampled_from([0, 1, 40]))
def test_no_text_gets_anything_else_to_the_terminal(text: str, columns: int) -> None:
    shown = block(text, columns)
    marks = 0
    for line in shown.split("\n"):
        assert line.startswith(GUTTER.rstrip())
        for character in line:
            category = unicodedata.category(character)
            marks = marks + 1 if category in ("Mn", "Me") else 0
            assert category not in UNREADABLE | {"Cc"}
            assert marks <= NAME_MARKS_MAX
