"""Strangers' text on a terminal: what would move the cursor, change colours or reorder a line is written out instead.

- A newline begins a new line, a tab is four blanks. Every other control, direction mark and invisible character shows
  as its number, `\\x1b` or `\\u202e`: it is seen, and does nothing.
- Every line begins with a gutter, and is broken before the terminal would do it: no text can pass for a line of ours.
"""

import unicodedata

from protocol.limits import NAME_MARKS_MAX
from protocol.people.names import BLANK, MARKS, UNREADABLE

GUTTER = "  | "
NARROWEST = 20
"""Columns that text gets however narrow the terminal is."""


def block(text: str, columns: int = 0) -> str:
    """A text with its gutter, no line wider than so many columns; 0 breaks none."""
    room = max(NARROWEST, columns - len(GUTTER)) if columns else 0
    lines = [part for line in text.split("\n") for part in _broken(_harmless(line), room)]
    return "\n".join(f"{GUTTER}{line}".rstrip() for line in lines)


def _harmless(line: str) -> list[str]:
    """What is shown for each character."""
    shown: list[str] = []
    marks = 0
    for character in line:
        category = unicodedata.category(character)
        marks = marks + 1 if category in MARKS else 0
        if character == "\t":
            shown.append("    ")
        elif category == "Cc" or category in UNREADABLE or character in BLANK or marks > NAME_MARKS_MAX:
            shown.append(_number(character))
        else:
            shown.append(character)
    return shown


def _number(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _broken(shown: list[str], room: int) -> list[str]:
    """The line in parts that fit."""
    parts, used = [""], 0
    for piece in shown:
        width = sum(_width(character) for character in piece)
        if room and used + width > room:
            parts.append("")
            used = 0
        parts[-1] += piece
        used += width
    return parts


def _width(character: str) -> int:
    """Columns of a character; a doubtful one counts as wide, and a mark as if it stood alone."""
    return 2 if unicodedata.east_asian_width(character) in "WFA" else 1
