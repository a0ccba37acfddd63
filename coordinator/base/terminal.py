"""Untrusted text on a terminal: characters that move the cursor, change colours or reorder a line are escaped.

- A newline begins a new line, a tab is four blanks. Every other control character, direction mark and invisible
  character is shown as its number, `\\x1b` or `\\u202e`, so it has no effect.
- Every line begins with a gutter, and is broken before the terminal would break it: no text looks like a line of ours.
"""

import unicodedata

from protocol.limits import NAME_MARKS_MAX
from protocol.text.plain import BLANK, MARKS, UNREADABLE

GUTTER = "  | "
NARROWEST = 20
"""The least columns of text, however narrow the terminal is."""


def block(text: str, columns: int = 0) -> str:
    """Return a text with its gutter, no line wider than `columns`; 0 breaks none."""
    room = max(NARROWEST, columns - len(GUTTER)) if columns else 0
    lines = [part for line in text.split("\n") for part in _broken(_harmless(line), room)]
    return "\n".join(f"{GUTTER}{line}".rstrip() for line in lines)


def harmless(text: str) -> str:
    """Return a text in which no character is invisible, reorders a line, or moves a cursor; its lines stay."""
    return "\n".join("".join(_harmless(line)) for line in text.split("\n"))


def _harmless(line: str) -> list[str]:
    """Return the text that is shown for each character."""
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
    """Return the line in parts that fit."""
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
    """Return the columns of a character; an ambiguous one counts as wide, and a mark as if it stood alone."""
    return 2 if unicodedata.east_asian_width(character) in "WFA" else 1
