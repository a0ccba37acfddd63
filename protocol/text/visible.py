"""Untrusted text as a reader sees it: one line without control characters, direction marks or invisible characters."""

import unicodedata

from protocol.limits import NAME_MARKS_MAX

MARKS = ("Mn", "Me")
UNREADABLE = frozenset({"Cf", "Cn", "Co", "Cs", "Zl", "Zp"})
"""Direction marks and other characters that are invisible or change the characters beside them."""

BLANK = frozenset("\u115f\u1160\u2800\u3164\uffa0")
"""Characters that Unicode calls letters, but that are invisible."""


def visible(text: str, chars_max: int) -> str:
    """Return untrusted text as one line that reads from left to right, without invisible characters."""
    kept: list[str] = []
    marks = NAME_MARKS_MAX  # a mark that follows no letter would be drawn over the text before it
    for character in text[: 8 * chars_max]:
        category = unicodedata.category(character)
        if character.isspace() or category == "Cc":
            kept.append(" ")
            marks = NAME_MARKS_MAX
        elif category not in UNREADABLE and character not in BLANK:
            marks = marks + 1 if category in MARKS else 0
            if marks <= NAME_MARKS_MAX:
                kept.append(character)
    shown = " ".join("".join(kept).split())
    return shown if len(shown) <= chars_max else shown[: chars_max - 1] + "…"
