"""Generations of the protocol: the current one, and the dates since which the work of older ones does not count.

- The number grows only when an older node would waste work or could not read plans. It is checked before any other
  field of a registration, because the other fields may have changed.
- A node that names none is of generation 0, which had no number yet.
"""

from datetime import date

from protocol.errors import AgentTooOld
from protocol.wire import canonical

CURRENT = 8

RETIRED = {
    0: date(2026, 11, 22),
    1: date(2026, 11, 23),
    2: date(2026, 11, 23),
    3: date(2026, 11, 25),
    4: date(2026, 11, 27),
    5: date(2026, 11, 28),
    6: date(2026, 11, 28),
    7: date(2026, 12, 1),
}
"""Generation → the day from which on its work does not count."""

UPDATE = "run `install.sh` again, or `pip install --upgrade echo-swarm` where it was installed so"


def require_spoken(generation: object) -> None:
    """Refuse a coordinator of another generation than ours, by the number in its status; an absent one says nothing."""
    if not isinstance(generation, int) or generation == CURRENT:
        return
    newer = generation > CURRENT
    raise AgentTooOld(
        f"This round uses generation {generation} of the protocol, and this node generation {CURRENT}.",
        hint=f"Update the node: {UPDATE}." if newer else "Join when the round's operator has updated the coordinator.",
    )


def require_current(value: canonical.Value) -> None:
    """Reject a registration of a retired generation; no other field is checked."""
    claimed = value.get("generation", 0) if isinstance(value, dict) else CURRENT
    since = RETIRED.get(claimed) if isinstance(claimed, int) else None
    if since is not None:
        raise AgentTooOld(
            f"This node uses generation {claimed} of the protocol. This coordinator uses generation {CURRENT} and "
            f"accepts no work of generation {claimed} since {since}.",
            hint=f"Update it: {UPDATE}.",
        )
