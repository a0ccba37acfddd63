"""Text for people: untrusted text made safe for a log, a terminal or a page, and nouns after a number."""

import unicodedata

from protocol.limits import NAME_MARKS_MAX


def one_line(text: str) -> str:
    """Return the text with line breaks and terminal control characters escaped, as `\\n` or `\\x1b`."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in text
    )


def counted(count: int, noun: str, many: str = "") -> str:
    """Return `count` with its noun: `1 node`, `2 nodes`, `1,000 entries`."""
    return f"{count:,} {plural(count, noun, many)}"


def plural(count: int, noun: str, many: str = "") -> str:
    """Return the noun in the form that follows `count`."""
    return noun if count == 1 else many or f"{noun}s"


def number_text(value: float) -> str:
    """Return a number without a needless decimal point or exponent: `80`, `0.5`, `1000000`."""
    return str(int(value)) if float(value).is_integer() else repr(round(float(value), 6))


def size_text(count: float) -> str:
    """Return a number of bytes with its unit, as `1.25 GB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * factor:  # below, it has at most three digits in the next smaller unit
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def duration_text(seconds: float) -> str:
    """Return a time in its largest unit of which there are at least two, as `5 min`; below a second, as `0.3 s`."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1g} s" if 0.001 <= seconds < 0.95 else f"{seconds:.0f} s"


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
