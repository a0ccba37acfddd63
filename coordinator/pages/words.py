"""Text forms of names, amounts and times on the pages.

- A node's name is untrusted text (`protocol.people.names`). A node without a printable name is shown by its nickname.
- Amounts are in the round's unit. A dash stands for an unknown value.
"""

from datetime import UTC, datetime
from math import isfinite

from protocol.limits import NAME_MAX_CHARS
from protocol.people.names import nickname, with_id
from protocol.text.html import Markup, el
from protocol.text.money import Unit
from protocol.text.plain import plural, visible

LINE_MAX = 300

DASH = "–"
NARROW = "\u202f"
"""The separator of thousands."""


def readable(name: str, node_id: str) -> str:
    """Return the name to show for a node, on one line and never empty."""
    return visible(name, NAME_MAX_CHARS) or nickname(node_id)


def owner(owner_id: str) -> str:
    """Return the name to show for an owner, with its id: a key with any given nickname can be made in minutes."""
    return with_id(nickname(owner_id), owner_id)


def line(text: str) -> str:
    """Return untrusted text on one line that reads from left to right."""
    return visible(text, LINE_MAX)


def whole(value: int) -> str:
    """Return a whole number with separated thousands."""
    return f"{value:,}".replace(",", NARROW)


def counted(count: int, noun: str, many: str = "") -> str:
    """Return `count` with the noun in the right number."""
    return f"{whole(count)} {plural(count, noun, many)}"


def figure(value: float | None, digits: int = 3) -> str:
    """Return a number with about `digits` significant digits."""
    if value is None or not isfinite(value):
        return DASH
    return whole(round(value)) if abs(value) >= 1000 else f"{value:.{digits}g}"


def short(value: int) -> str:
    """Return a large number in thousands, millions, billions or trillions."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= 0.9995 * unit:  # what is rounded to the unit
            return f"{value / unit:.3g}{name}"
    return str(value)


def money(unit: Unit, micros: float | None) -> str:
    """Return an amount with the unit's name."""
    return DASH if micros is None else unit.amount(micros, separator=NARROW)


def sum_of(unit: Unit, micros: float | None) -> str:
    """Return an amount without the unit's name, for a table that names it."""
    return DASH if micros is None else unit.figure(micros, separator=NARROW)


def exact(unit: Unit, micros: int) -> str:
    """Return an amount with the unit's name and every decimal that is not zero."""
    return unit.exact(micros, separator=NARROW)


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f}\u202f%"


def seconds(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}\u202fs"


def size(size_bytes: int | None) -> str:
    """Return a number of bytes in the unit that fits."""
    if size_bytes is None:
        return DASH
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f}\u202f{name}"
    return str(size_bytes)


def moment(moment_ms: int | None) -> Markup:
    """Return a time in UTC, as an element that scripts and screen readers understand."""
    if moment_ms is None:
        return el("span", DASH)
    when = datetime.fromtimestamp(moment_ms / 1000, UTC)
    return el("time", f"{when:%Y-%m-%d %H:%M:%S} UTC", datetime=when.isoformat(timespec="seconds"))


def day(number: int) -> str:
    """Return a date, given its number of days since 1970-01-01."""
    return f"{datetime.fromtimestamp(86_400 * number, UTC):%Y-%m-%d}"


def ago(duration_ms: int) -> str:
    """Return how long ago something was, in the largest unit that fits."""
    for unit_ms, name in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min")):
        if duration_ms >= unit_ms:
            return f"{duration_ms // unit_ms}\u202f{name} ago"
    return f"{max(0, duration_ms) // 1000}\u202fs ago"
