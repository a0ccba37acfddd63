"""Which generation of the protocol a node speaks, and since when the work of older ones does not count.

- The number grows only when a node that does not follow would wasted work, or could not read plans. It is looked at
  before anything else of a registration, whose other fields may have changed.
- A node that names none is of generation 0: it was made before they had numbers.
"""

from datetime import date

from protocol.errors import AgentTooOld
from protocol.wire import canonical

CURRENT = 4

RETIRED = {0: date(2026, 11, 22), 1: date(2026, 11, 23), 2: date(2026, 11, 23), 3: date(2026, 11, 25)}
"""Generation → the day from which on its work does not count."""

UPDATE = "run `install.sh` again, or `pip install --upgrade echo-swarm` where it was installed so"


def require_current(value: canonical.Value) -> None:
    """Refuse a registration of a generation that is retired; the rest of it is not looked at."""
    said = value.get("generation", 0) if isinstance(value, dict) else CURRENT
    since = RETIRED.get(said) if isinstance(said, int) else None
    if since is not None:
        raise AgentTooOld(
            f"This node speaks generation {said} of the protocol; its work does not count since {since}, and "
            f"generation {CURRENT} is spoken here.",
            hint=f"Update it: {UPDATE}.",
        )
