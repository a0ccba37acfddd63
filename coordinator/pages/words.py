"""How the pages write names, amounts and moments.

- A node's name is a stranger's text (`protocol.people.names`). Who has no name left is called by its nickname.
- Amounts are millionths of the operator's unit. A dash is what is not known.
"""

from datetime import UTC, datetime

from coordinator.pages.html import Markup, el
from protocol.limits import NAME_MAX_CHARS
from protocol.people.names import visible, with_id
from protocol.people.nicknames import nickname
from protocol.text.plain import plural

LINE_MAX = 300

DASH = "–"


def readable(name: str, node_id: str) -> str:
    """The name to show for a node, on one line and never empty."""
    return visible(name, NAME_MAX_CHARS) or nickname(node_id)


def owner(owner_id: str) -> str:
    """The name to show for an owner: a key with any given nickname can be made in minutes."""
    return with_id(nickname(owner_id), owner_id)


def line(text: str) -> str:
    """What a stranger wrote, on one line that reads from left to right."""
    return visible(text, LINE_MAX)


def whole(value: int) -> str:
    """A whole number with its thousands apart."""
    return f"{value:,}".replace(",", "\u202f")


def counted(count: int, noun: str, many: str = "") -> str:
    """How many of something."""
    return f"{whole(count)} {plural(count, noun, many)}"


def figure(value: float | None, digits: int = 3) -> str:
    """Any number in about so many digits."""
    if value is None:
        return DASH
    return whole(round(value)) if abs(value) >= 1000 else f"{value:.{digits}g}"


def percent(share: float | None) -> str:
    return DASH if share is None else f"{100 * share:.1f}\u202f%"


def seconds(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}\u202fs"


def size(size_bytes: int | None) -> str:
    """Bytes in the unit that fits."""
    if size_bytes is None:
        return DASH
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.1f}\u202f{name}"
    return str(size_bytes)


def moment(moment_ms: int | None) -> Markup:
    """A moment that scripts and screen readers understand, too."""
    if moment_ms is None:
        return el("span", DASH)
    when = datetime.fromtimestamp(moment_ms / 1000, UTC)
    return el("time", f"{when:%Y-%m-%d %H:%M:%S} UTC", datetime=when.isoformat(timespec="seconds"))


def day(number: int) -> str:
    """A day by its number since 1970."""
    return f"{datetime.fromtimestamp(86_400 * number, UTC):%Y-%m-%d}"


def ago(duration_ms: int) -> str:
    """How long something is over, in the largest unit that fits."""
    for unit_ms, name in ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min")):
        if duration_ms >= unit_ms:
            return f"{duration_ms // unit_ms}\u202f{name} ago"
    return f"{max(0, duration_ms) // 1000}\u202fs ago"
